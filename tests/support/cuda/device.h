// What the emulated NCCL (nccl.cpp) needs of the emulated device (device.cpp).
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace emulated {

// The same memory as a CPU tensor.
at::Tensor host(const at::Tensor& t);

// Work on the stream of collectives of the tensors' device, after what the current stream has queued.
// Raises where the tensors are not on a device of their own, all on one.
void collective(const std::vector<at::Tensor>& reads, const std::vector<at::Tensor>& writes, const std::string& name);

// Let the current stream of a device wait for its collectives.
void await_collectives(int device);

}  // namespace emulated
