// NCCL on the emulated device: gloo moves the data, between the same memory as CPU tensors.
//
// Collectives run on a stream of their own, and the current stream has to wait for them (`Work.wait`), as
// with NCCL; tensors of the host are refused. Each is told to a callback (`emulated_on_collective`).

#include "device.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace {

using Tensors = std::vector<at::Tensor>;

void (*on_collective)(const char*) = nullptr;

class Work : public c10d::Work {
 public:
  Work(int device, Tensors kept) : device_(device), kept_(std::move(kept)) {}
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    emulated::await_collectives(device_);
    return true;
  }
  void synchronize() override { emulated::await_collectives(device_); }
  void blockCurrentStream() override { emulated::await_collectives(device_); }
  Tensors result() override { return kept_; }

 private:
  int device_;
  Tensors kept_;
};

Tensors hosts(const Tensors& tensors) {
  Tensors found;
  for (auto& t : tensors) found.push_back(emulated::host(t));
  return found;
}

class NCCL : public c10d::Backend {
 public:
  NCCL(c10::intrusive_ptr<c10d::Backend> gloo) : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}
  const std::string getBackendName() const override { return "nccl"; }
  bool supportsCoalescing() const override { return false; }

  c10::intrusive_ptr<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) override {
    auto work = begin("broadcast", tensors, tensors);
    auto aliases = hosts(tensors);
    gloo_->broadcast(aliases, o)->wait();
    return work;
  }
  c10::intrusive_ptr<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) override {
    auto work = begin("all_reduce", tensors, tensors);
    auto aliases = hosts(tensors);
    gloo_->allreduce(aliases, o)->wait();
    return work;
  }
  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& o) override {
    Tensors all;
    for (auto& list : outputs) all.insert(all.end(), list.begin(), list.end());
    auto work = begin("all_gather", inputs, all);
    std::vector<Tensors> aliases;
    for (auto& list : outputs) aliases.push_back(hosts(list));
    auto from = hosts(inputs);
    gloo_->allgather(aliases, from, o)->wait();
    return work;
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& o) override {
    auto work = begin("all_gather_into_tensor", {input}, {output});
    auto to = emulated::host(output), from = emulated::host(input);
    gloo_->_allgather_base(to, from, o)->wait();
    return work;
  }
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& o) override {
    auto work = begin("all_gather_into_tensor", inputs, outputs);
    auto to = hosts(outputs), from = hosts(inputs);
    for (size_t i = 0; i < to.size(); ++i) gloo_->_allgather_base(to[i], from[i], o)->wait();
    return work;
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& o) override {
    auto work = begin("reduce_scatter_tensor", {input}, {output});
    auto to = emulated::host(output), from = emulated::host(input);
    gloo_->_reduce_scatter_base(to, from, o)->wait();
    return work;
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& o) override {
    gloo_->barrier(o)->wait();
    return c10::make_intrusive<Work>(0, Tensors{});
  }

 private:
  c10::intrusive_ptr<c10d::Work> begin(const std::string& name, const Tensors& reads, const Tensors& writes) {
    for (auto* list : {&reads, &writes})
      for (auto& t : *list)
        TORCH_CHECK(t.is_cuda() && t.is_contiguous(), "NCCL: ", name, " of a tensor on ", t.device(),
                    ", expected a contiguous one on a GPU");
    emulated::collective(reads, writes, "NCCL " + name);
    if (on_collective) {
      auto& t = reads.front();
      auto text = name + " " + std::to_string(t.numel()) + " " + c10::toString(t.scalar_type());
      on_collective(text.c_str());
    }
    return c10::make_intrusive<Work>(reads.front().device().index(), writes);
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
};

}  // namespace

extern "C" {
void emulated_on_collective(void (*callback)(const char*)) { on_collective = callback; }
// Give a process group that has gloo for CPU tensors this for those of the device.
void emulated_nccl(const char* group) {
  auto found = c10d::resolve_process_group(group);
  auto gloo = found->getBackend(c10::kCPU);
  auto made = c10::make_intrusive<NCCL>(gloo);
  made->setGroupUid(gloo->getGroupUid());
  made->setGroupDesc(gloo->getGroupDesc());
  found->setBackend(c10::kCUDA, c10d::ProcessGroup::BackendType::NCCL, c10::intrusive_ptr<c10d::Backend>(made));
}
}
