// An emulated CUDA device for a CPU build of torch: tensors say `cuda`, their memory is the host's, and
// every operator runs on the CPU kernel behind it. What a real device refuses is refused here:
//
// - operators over tensors of several devices (but for numbers, as 0-dimensional CPU tensors);
// - work on a stream that needs another stream's results and does not wait for them;
// - memory that is freed while another stream may still use it (record_stream);
// - pinned memory that is changed, or read, before its asynchronous copy has ended;
// - more memory than a limit: torch.OutOfMemoryError.
//
// Kernels run when they are called: that is one of the orders a device may choose. What asynchronous
// copies bring to the host arrives only once the host has waited for it; until then the destination
// holds 0xFF bytes, as does every new allocation. Streams are vector clocks: an operator on a stream has
// a number, an event is a snapshot of what is known to have happened before it. Operators that make
// the host wait are told to a callback (`emulated_on_wait`).
//
// Loaded with ctypes, which runs the registrations below; device.py beside it is its other half.
// Sources for what CUDA does: torch's aten/src/ATen/native/cuda/Copy.cu (when a copy waits),
// c10/cuda/CUDACachingAllocator.cpp (streams of a block), ATen/core/CachingHostAllocator.h.

#include "device.h"

#include <ATen/ATen.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using StreamKey = std::pair<int, int64_t>;       // device, stream
using Clock = std::map<StreamKey, int64_t>;      // how many operators of each stream have happened

struct Use {
  Clock reads, write;  // the last ones, a number a stream
};

struct Block {  // of device memory
  size_t bytes = 0;
  StreamKey home;              // the stream it was allocated on
  std::set<StreamKey> recorded;  // by record_stream
  Use use;
};

struct Copy {  // between pinned memory and the device, not yet known to have ended
  StreamKey stream;
  int64_t number;
  void* host;
  std::vector<char> bytes;  // what is to arrive, or what must still lie at the source
  bool to_host;
};

struct Event {
  Clock clock;
  std::chrono::steady_clock::time_point at;
  int polls = 0;
};

struct State {
  std::recursive_mutex mutex;
  int devices = 2;
  int64_t next_stream = 1;
  Clock issued;                          // operators issued on each stream
  std::map<StreamKey, Clock> known;      // what each stream waits for
  Clock host;                            // what the host has waited for
  std::unordered_map<void*, Block> blocks;
  std::map<StreamKey, Clock> freed;      // by stream of allocation: who may still use what was freed
  std::map<char*, size_t> pinned;        // live and free blocks of pinned memory
  std::vector<std::pair<char*, size_t>> retired;  // freed pinned blocks whose copies have not ended
  std::vector<Copy> copies;
  std::vector<std::string> faults;
  std::vector<int64_t> allocated, peak, limit;
  bool races = true;
  int lag = 2;  // how often an event says that it has not happened
};

State& state() {
  static auto* s = [] {
    auto* made = new State;
    made->allocated.assign(16, 0);
    made->peak.assign(16, 0);
    made->limit.assign(16, INT64_MAX);
    return made;
  }();
  return *s;
}

thread_local int current_device = 0;
thread_local std::map<int, int64_t> current_streams;

void (*on_wait)(const char*) = nullptr;
void (*on_operator)(const char*) = nullptr;

StreamKey current(int device) { return {device, current_streams[device]}; }

void waited(const std::string& why) {
  if (on_wait) on_wait(why.c_str());
}

std::string show(StreamKey s) {
  return "stream " + std::to_string(s.second) + " of cuda:" + std::to_string(s.first);
}

bool happened(const Clock& in, StreamKey stream, int64_t number) {
  auto at = in.find(stream);
  return at != in.end() && at->second >= number;
}

void merge(Clock& into, const Clock& from) {
  for (auto& [stream, number] : from) into[stream] = std::max(into[stream], number);
}

void fault(const std::string& text) { state().faults.push_back(text); }

// The host knows now that everything in `clock` has happened: copies that belong to it arrive.
void complete(const Clock& clock) {
  auto& s = state();
  merge(s.host, clock);
  std::vector<Copy> left;
  for (auto& copy : s.copies) {
    if (!happened(s.host, copy.stream, copy.number)) {
      left.push_back(std::move(copy));
    } else if (copy.to_host) {
      std::memcpy(copy.host, copy.bytes.data(), copy.bytes.size());
    } else if (std::memcmp(copy.host, copy.bytes.data(), copy.bytes.size()) != 0) {
      fault("pinned memory was changed before its copy to the device had ended");
    }
  }
  s.copies = std::move(left);
  for (size_t i = 0; i < s.retired.size();) {
    auto [from, bytes] = s.retired[i];
    bool busy = false;
    for (auto& copy : s.copies)
      busy = busy || (copy.host >= from && static_cast<char*>(copy.host) < from + bytes);
    if (busy) {
      ++i;
    } else {
      s.pinned.erase(from);
      c10::free_cpu(from);
      s.retired.erase(s.retired.begin() + i);
    }
  }
}

Clock clock_of(StreamKey stream) {
  auto& s = state();
  Clock clock = s.known[stream];
  merge(clock, s.host);
  clock[stream] = s.issued[stream];
  return clock;
}

// --- memory -----------------------------------------------------------------------------------

void check_limit(int device, int64_t bytes) {
  auto& s = state();
  if (s.allocated[device] + bytes > s.limit[device])
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", bytes >> 10,
        " KiB. GPU ", device, " has a total capacity of ", s.limit[device] >> 10, " KiB");
}

void add_block(void* data, size_t bytes, int device) {
  auto& s = state();
  // What was freed on this stream may be given out again, so its uses on others have to have happened.
  StreamKey home = current(device);
  auto pending = s.freed.find(home);
  if (pending != s.freed.end()) {
    Clock now = clock_of(home);
    for (auto& [stream, number] : pending->second)
      if (s.races && !happened(now, stream, number))
        fault("memory of " + show(home) + " is given out again while " + show(stream) +
              " may still use it (record_stream was not called)");
    s.freed.erase(pending);
  }
  s.blocks[data] = Block{bytes, current(device), {}, {}};
  s.allocated[device] += bytes;
  s.peak[device] = std::max(s.peak[device], s.allocated[device]);
}

void remove_block(void* data) {
  auto& s = state();
  std::lock_guard lock(s.mutex);
  auto at = s.blocks.find(data);
  if (at == s.blocks.end()) return;
  auto& block = at->second;
  Clock used = block.use.reads;
  merge(used, block.use.write);
  for (auto& [stream, number] : used)
    if (stream != block.home && !block.recorded.count(stream)) merge(s.freed[block.home], Clock{{stream, number}});
  s.allocated[block.home.first] -= block.bytes;
  s.blocks.erase(at);
}

void free_device(void* data) {
  remove_block(data);
  c10::free_cpu(data);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto& s = state();
    std::lock_guard lock(s.mutex);
    Device device(c10::kCUDA, static_cast<DeviceIndex>(current_device));
    if (!bytes) return {nullptr, nullptr, &free_device, device};
    check_limit(current_device, bytes);
    void* data = c10::alloc_cpu(bytes);
    std::memset(data, 0xFF, bytes);
    add_block(data, bytes, current_device);
    return {data, data, &free_device, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
};

void free_pinned(void* data) {
  auto& s = state();
  std::lock_guard lock(s.mutex);
  auto at = s.pinned.find(static_cast<char*>(data));
  if (at == s.pinned.end()) return;
  s.retired.emplace_back(at->first, at->second);  // its copies may still run: freed when they have
  complete({});
}

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto& s = state();
    std::lock_guard lock(s.mutex);
    if (!bytes) return {nullptr, nullptr, &free_pinned, Device(c10::kCPU)};
    auto* data = static_cast<char*>(c10::alloc_cpu(bytes));
    std::memset(data, 0xFF, bytes);
    s.pinned[data] = bytes;
    return {data, data, &free_pinned, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

DeviceAllocator device_allocator;
PinnedAllocator pinned_allocator;

bool is_pinned(const void* data) {
  auto& s = state();
  std::lock_guard lock(s.mutex);
  auto* at = static_cast<const char*>(data);
  auto next = s.pinned.upper_bound(const_cast<char*>(at));
  if (next == s.pinned.begin()) return false;
  --next;
  return at < next->first + next->second;
}

// --- streams and events -----------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  Device exchangeDevice(Device d) const override {
    Device old = getDevice();
    if (d.index() >= 0) setDevice(d);
    return old;
  }
  Device getDevice() const override { return Device(c10::kCUDA, static_cast<DeviceIndex>(current_device)); }
  void setDevice(Device d) const override {
    TORCH_CHECK(d.index() < state().devices, "CUDA error: invalid device ordinal");
    if (d.index() >= 0) current_device = d.index();
  }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0) current_device = d.index();
  }
  Stream make(int device, int64_t id) const {
    return Stream(Stream::UNSAFE, Device(c10::kCUDA, static_cast<DeviceIndex>(device)), id);
  }
  int index(Device d) const { return d.index() < 0 ? current_device : d.index(); }
  Stream getStream(Device d) const override { return make(index(d), current_streams[index(d)]); }
  Stream getDefaultStream(Device d) const override { return make(index(d), 0); }
  Stream getNewStream(Device d, int) const override {
    auto& s = state();
    std::lock_guard lock(s.mutex);
    return make(index(d), s.next_stream++);
  }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream exchangeStream(Stream stream) const override {
    Stream old = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return old;
  }
  static StreamKey key(const Stream& stream) { return {stream.device_index(), stream.id()}; }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(state().devices); }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    auto& s = state();
    std::lock_guard lock(s.mutex);
    if (!*event) *event = new Event;
    auto& e = *static_cast<Event*>(*event);
    e.clock = clock_of(key(stream));
    e.at = std::chrono::steady_clock::now();
    e.polls = 0;
  }
  void block(void* event, const Stream& stream) const override {
    auto& s = state();
    std::lock_guard lock(s.mutex);
    if (event) merge(s.known[key(stream)], static_cast<Event*>(event)->clock);
  }
  bool queryEvent(void* event) const override {
    auto& s = state();
    std::lock_guard lock(s.mutex);
    if (!event) return true;
    auto& e = *static_cast<Event*>(event);
    bool done = true;
    for (auto& [stream, number] : e.clock) done = done && happened(s.host, stream, number);
    if (!done && ++e.polls >= s.lag) {
      complete(e.clock);
      done = true;
    }
    return done;
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void synchronizeEvent(void* event) const override {
    waited("event.synchronize");
    auto& s = state();
    std::lock_guard lock(s.mutex);
    if (event) complete(static_cast<Event*>(event)->clock);
  }
  bool queryStream(const Stream& stream) const override {
    auto& s = state();
    std::lock_guard lock(s.mutex);
    return happened(s.host, key(stream), s.issued[key(stream)]);
  }
  void synchronizeStream(const Stream& stream) const override {
    waited("stream.synchronize");
    auto& s = state();
    std::lock_guard lock(s.mutex);
    complete(clock_of(key(stream)));
  }
  void synchronizeDevice(const DeviceIndex index) const override {
    waited("torch.cuda.synchronize");
    auto& s = state();
    std::lock_guard lock(s.mutex);
    Clock clock;
    for (auto& [stream, number] : s.issued)
      if (stream.first == index) clock[stream] = number;
    complete(clock);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    auto& s = state();
    std::lock_guard lock(s.mutex);
    auto at = s.blocks.find(data.get_context());
    if (at != s.blocks.end()) at->second.recorded.insert(key(stream));
  }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    auto span = static_cast<Event*>(to)->at - static_cast<Event*>(from)->at;
    return std::chrono::duration<double, std::milli>(span).count();
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// --- what the generic parts of torch ask about CUDA -------------------------------------------

// found by this name
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return static_cast<DeviceIndex>(::current_device); }
  DeviceIndex getCurrentDevice() const override { return current_device(); }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(state().devices); }
  int getNumGPUs() const override { return state().devices; }
  void setCurrentDevice(DeviceIndex d) const override { ::current_device = d; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override {
    auto old = current_device();
    if (d >= 0) ::current_device = d;
    return old;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  Device getDeviceFromPtr(void*) const override { return Device(c10::kCUDA, current_device()); }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  void deviceSynchronize(DeviceIndex d) const override { Guard().synchronizeDevice(d); }
};

}  // namespace

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks)
}

namespace {

// --- operators --------------------------------------------------------------------------------

// The same memory as a CPU tensor.
at::Tensor host(const at::Tensor& t) {
  if (!t.defined() || !t.is_cuda()) return t;
  auto options = t.options().device(at::kCPU).requires_grad(false).pinned_memory(false);
  return at::from_blob(t.numel() ? t.data_ptr() : nullptr, t.sizes(), t.strides(), options);
}

void free_adopted(void* context) {
  auto* held = static_cast<at::Tensor*>(context);
  remove_block(held->storage().mutable_data());
  delete held;
}

// The memory of a new CPU tensor as a tensor of the device.
at::Tensor adopt(at::Tensor t, int device) {
  if (!t.defined()) return t;
  auto& s = state();
  Device on(c10::kCUDA, static_cast<DeviceIndex>(device));
  size_t bytes = t.storage().nbytes();
  void* data = t.storage().mutable_data();
  c10::DataPtr pointer(nullptr, nullptr, &free_device, on);
  if (bytes) {
    check_limit(device, bytes);
    add_block(data, bytes, device);
    // blocks are found by context in recordDataPtrOnStream: kept under the data's address
    pointer = c10::DataPtr(data, new at::Tensor(t), &free_adopted, on);
  }
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(pointer), &device_allocator, true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), t.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  (void)s;
  return made;
}

void* base(const at::Tensor& t) { return t.storage().mutable_data(); }

// Account for an operator on a stream: what it reads and writes has to have happened before it.
int64_t issue(StreamKey stream, const std::vector<at::Tensor>& reads, const std::vector<at::Tensor>& writes,
              const std::string& name) {
  auto& s = state();
  int64_t number = ++s.issued[stream];
  Clock before = clock_of(stream);
  auto check = [&](const Clock& needed, const char* what) {
    for (auto& [other, at] : needed)
      if (s.races && other != stream && !happened(before, other, at)) {
        auto text = name + " on " + show(stream) + " " + what + " " + show(other) +
            " without waiting for it (wait_stream, wait_event)";
        fault(text);
        TORCH_CHECK(false, text);
      }
  };
  for (auto& t : reads) {
    auto at = s.blocks.find(base(t));
    if (at == s.blocks.end()) continue;
    check(at->second.use.write, "reads what is written on");
    at->second.use.reads[stream] = number;
  }
  for (auto& t : writes) {
    auto at = s.blocks.find(base(t));
    if (at == s.blocks.end()) continue;
    check(at->second.use.write, "writes what is written on");
    check(at->second.use.reads, "writes what is read on");
    at->second.use.write = Clock{{stream, number}};
  }
  return number;
}

// Operators that take a 0-dimensional CPU tensor beside those of the device, apart from pointwise ones.
bool takes_cpu_number(const std::string& name) {
  static const std::set<std::string> known{"aten::index_put_", "aten::_index_put_impl_", "aten::masked_fill_",
                                           "aten::fill_", "aten::where", "aten::masked_fill",
                                           "aten::floor_divide", "aten::remainder"};
  return known.count(name) > 0;
}

// Operators whose results have sizes, or values, that the host has to know.
bool waits(const std::string& name) {
  static const std::set<std::string> known{
      "aten::nonzero", "aten::_local_scalar_dense", "aten::masked_select", "aten::equal", "aten::unique_dim",
      "aten::_unique2", "aten::_unique", "aten::bincount", "aten::unique_consecutive",
      "aten::repeat_interleave", "aten::is_set_to", "aten::nonzero_static_out"};
  return known.count(name) > 0;
}

void run_on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  auto& s = state();
  const auto& schema = op.schema();
  const auto& name = schema.name();
  const size_t count = schema.arguments().size();
  const size_t begin = stack->size() - count;

  // Indices may come from the host, and are copied; masks are turned into them, both of which waits.
  bool indexes = name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_" ||
      name == "aten::_unsafe_index";

  // One tensor argument, or one of a list's.
  struct Argument {
    at::Tensor own, cpu;
    bool written, index = false;
  };
  std::vector<Argument> all;
  int device = -1;
  auto see = [&](const at::Tensor& t, bool written) {
    if (!t.defined()) return;
    if (t.is_cuda()) {
      if (device < 0) device = t.device().index();
      TORCH_CHECK(
          device == t.device().index(), name,
          ": Expected all tensors to be on the same device, but found at least two devices, cuda:", device,
          " and ", t.device(), "!");
    }
    // what is to be resized needs memory of its own, which the tensor takes over afterwards
    bool empty = t.is_cuda() && written && !t.numel();
    all.push_back({t, empty ? at::empty({0}, t.options().device(at::kCPU)) : host(t), written});
  };
  for (size_t i = 0; i < count; ++i) {
    const auto& value = (*stack)[begin + i];
    const auto* alias = schema.arguments()[i].alias_info();
    bool written = alias && alias->isWrite();
    if (value.isTensor()) {
      see(value.toTensor(), written);
    } else if (value.isTensorList()) {
      for (const auto& t : value.toTensorVector()) see(t, written);
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector()) {
        if (!t || !t->defined()) continue;
        see(*t, written);
        bool mask = t->scalar_type() == at::kBool || t->scalar_type() == at::kByte;
        if (indexes && !t->is_cuda()) all.back().index = true;
        if (indexes && (mask || !t->is_cuda())) waited(name + (mask ? " with a mask" : " with a CPU index"));
      }
    }
  }
  for (size_t i = 0; i < count && device < 0; ++i)  // a factory
    if ((*stack)[begin + i].isDevice()) device = std::max<int>((*stack)[begin + i].toDevice().index(), -1);
  if (device < 0) device = current_device;
  for (auto& a : all)
    if (!a.own.is_cuda())
      TORCH_CHECK(
          (a.index && device >= 0) ||
              (a.own.dim() == 0 && !a.written && (op.hasTag(at::Tag::pointwise) || takes_cpu_number(name))),
          name,
          ": Expected all tensors to be on the same device, but found at least two devices, cuda:", device,
          " and cpu!");

  if (on_operator) on_operator(name.c_str());
  if (waits(name)) waited(name);
  StreamKey stream = current(device);
  {
    std::lock_guard lock(s.mutex);
    std::vector<at::Tensor> reads, writes;
    for (auto& a : all)
      if (a.own.is_cuda() && a.own.numel()) (a.written ? writes : reads).push_back(a.own);
    auto number = issue(stream, reads, writes, name);
    if (waits(name)) complete(clock_of(stream));
    (void)number;
  }

  size_t next = 0;
  for (size_t i = 0; i < count; ++i) {
    auto& value = (*stack)[begin + i];
    auto take = [&](const at::Tensor& t) { return t.defined() ? all[next++].cpu : t; };
    if (value.isTensor()) {
      value = take(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const auto& t : value.toTensorVector()) list.push_back(take(t));
      value = c10::IValue(c10::List<at::Tensor>(list));
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector())
        list.push_back(t ? std::optional<at::Tensor>(take(*t)) : std::nullopt);
      value = c10::IValue(list);
    } else if (value.isDevice()) {
      value = c10::IValue(Device(c10::kCPU));
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);

  const size_t results = schema.returns().size();
  const size_t first = stack->size() - results;
  // An argument that is returned, a view of one, or new memory.
  auto give = [&](const at::Tensor& t) -> at::Tensor {
    if (!t.defined()) return t;
    for (auto& a : all)
      if (a.cpu.is_same(t)) return a.own;
    if (t.device().type() != at::kCPU) return t;
    auto* at = static_cast<char*>(t.storage().mutable_data());
    for (auto& a : all) {
      if (!a.own.is_cuda() || !t.numel() || !a.own.numel()) continue;
      auto* from = static_cast<char*>(base(a.own));
      if (at >= from && at < from + a.own.storage().nbytes()) {
        auto offset = (static_cast<char*>(t.data_ptr()) - from) / static_cast<int64_t>(t.element_size());
        return at::native::as_strided_tensorimpl(a.own, t.sizes(), t.strides(), offset);
      }
    }
    return adopt(t, device);
  };
  std::lock_guard lock(s.mutex);
  std::vector<at::Tensor> made;
  for (auto& a : all)
    if (a.own.is_cuda() && a.written && !a.own.numel() && a.cpu.numel()) {
      auto grown = adopt(a.cpu, device);
      a.own.unsafeGetTensorImpl()->set_storage_keep_dtype(grown.storage());
      a.own.unsafeGetTensorImpl()->set_sizes_and_strides(a.cpu.sizes(), a.cpu.strides(), a.cpu.storage_offset());
      made.push_back(a.own);
    }
  for (size_t i = 0; i < results; ++i) {
    auto& value = (*stack)[first + i];
    if (value.isTensor()) {
      auto t = give(value.toTensor());
      if (t.defined()) made.push_back(t);
      value = t;
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const auto& t : value.toTensorVector()) {
        list.push_back(give(t));
        made.push_back(list.back());
      }
      value = c10::IValue(c10::List<at::Tensor>(list));
    }
  }
  for (auto& t : made) {
    auto at = s.blocks.find(t.defined() && t.numel() ? base(t) : nullptr);
    if (at != s.blocks.end() && at->second.use.write.empty()) at->second.use.write = Clock{{stream, s.issued[stream]}};
  }
}

at::Tensor empty_memory_format(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(Device(c10::kCUDA)));
  return at::detail::empty_generic(
      size, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
      dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype())), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(Device(c10::kCUDA)));
  return at::detail::empty_strided_generic(
      size, stride, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
      dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype())));
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  int64_t wanted = 1;
  for (auto n : size) wanted *= n;
  auto* impl = self.unsafeGetTensorImpl();
  size_t bytes = (wanted + self.storage_offset()) * self.element_size();
  if (bytes > self.storage().nbytes()) {
    c10::DeviceGuard guard(self.device());
    auto data = device_allocator.allocate(bytes);
    if (self.storage().nbytes()) std::memcpy(data.get(), self.storage().data(), self.storage().nbytes());
    self.storage().set_data_ptr_noswap(std::move(data));
    self.storage().set_nbytes(bytes);
  }
  impl->set_sizes_contiguous(size);
  return self;
}

// As at::native::copy_ for CUDA: which copies the host waits for, and which run by themselves.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  auto& s = state();
  if (self.is_same(source)) return self;
  if (on_operator) on_operator("aten::copy_");
  at::Tensor from = source.expand_as(self);
  if (!self.numel()) return self;
  if (self.is_cuda() && source.is_cuda()) {
    std::lock_guard lock(s.mutex);
    StreamKey here = current(source.device().index()), there = current(self.device().index());
    if (here != there) {  // both streams wait for each other
      merge(s.known[here], clock_of(there));
      merge(s.known[there], clock_of(here));
    }
    issue(here, {source}, {self}, "aten::copy_");
    if (here != there) merge(s.known[there], clock_of(here));
    host(self).copy_(host(from));
    return self;
  }
  const at::Tensor& on_device = self.is_cuda() ? self : source;
  const at::Tensor& on_host = self.is_cuda() ? source : self;
  StreamKey stream = current(on_device.device().index());
  bool direct = self.scalar_type() == source.scalar_type() &&
      ((self.is_contiguous() && from.is_contiguous()) ||
       (self.sizes() == source.sizes() && self.strides() == source.strides() && self.is_non_overlapping_and_dense()));
  // What is not direct goes through a copy in memory that is not pinned.
  bool by_itself = non_blocking && direct && is_pinned(on_host.data_ptr());
  if (!by_itself) waited(self.is_cuda() ? "copy to the device" : "copy to the host");
  std::lock_guard lock(s.mutex);
  auto number = self.is_cuda() ? issue(stream, {}, {self}, "aten::copy_") : issue(stream, {source}, {}, "aten::copy_");
  if (by_itself) {
    size_t bytes = on_host.nbytes();
    auto* memory = static_cast<char*>(on_host.data_ptr());
    auto* data = static_cast<const char*>(self.is_cuda() ? static_cast<void*>(memory) : on_device.data_ptr());
    s.copies.push_back({stream, number, memory, std::vector<char>(data, data + bytes), !self.is_cuda()});
    if (self.is_cuda()) {
      std::memcpy(self.data_ptr(), memory, bytes);
    } else {
      std::memset(memory, 0xFF, bytes);
    }
  } else {
    complete(clock_of(stream));
    host(self).copy_(host(from));
  }
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  at::Tensor target = to;
  copy_(target, self, non_blocking);
  return to;
}

at::Scalar local_scalar(const at::Tensor& self) {
  waited("aten::_local_scalar_dense");
  auto& s = state();
  std::lock_guard lock(s.mutex);
  StreamKey stream = current(self.device().index());
  issue(stream, {self}, {}, "aten::_local_scalar_dense");
  complete(clock_of(stream));
  return host(self).item();
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  auto& s = state();
  std::lock_guard lock(s.mutex);
  if (!self.numel()) return;
  auto at = s.blocks.find(base(self));
  if (at != s.blocks.end()) at->second.recorded.insert(Guard::key(stream));
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("record_stream", record_stream);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("set_.source_Storage", [](at::Tensor& self, at::Storage source) -> at::Tensor& {
    return at::native::set_(self, source);
  });
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("histc", [](const at::Tensor& self, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
    // takes integers there, and floats alone on the host
    auto& s = state();
    std::lock_guard lock(s.mutex);
    StreamKey stream = current(self.device().index());
    issue(stream, {self}, {}, "aten::histc");
    return adopt(at::histc(host(self).to(at::kFloat), bins, low, high).to(self.scalar_type()), self.device().index());
  });
  // composite, and would choose among cuDNN's kernels
  m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

// For kernels written in Python (device.py): the same memory on the other side, without any wait.
TORCH_LIBRARY(emulated, m) {
  m.def("host(Tensor self) -> Tensor");
  m.def("adopt(Tensor self, int device) -> Tensor");
  m.def("resize_storage(Tensor self, int bytes) -> ()");
}
TORCH_LIBRARY_IMPL(emulated, CompositeExplicitAutograd, m) {
  m.impl("host", [](const at::Tensor& t) { return host(t); });
  m.impl("resize_storage", [](const at::Tensor& t, int64_t bytes) {
    c10::DeviceGuard guard(t.device());
    auto old = t.storage();
    auto data = device_allocator.allocate(bytes);
    std::memcpy(data.get(), old.data(), std::min<size_t>(bytes, old.nbytes()));
    old.set_data_ptr_noswap(std::move(data));
    old.set_nbytes(bytes);
  });
  m.impl("adopt", [](const at::Tensor& t, int64_t device) {
    auto& s = state();
    std::lock_guard lock(s.mutex);
    auto made = adopt(t.clone(), static_cast<int>(device));
    StreamKey stream = current(static_cast<int>(device));
    issue(stream, {}, {made}, "a kernel");
    return made;
  });
}

// scaled_dot_product_attention asks a stub, not the operator, which kernel to take.
int64_t choose_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& mask, double dropout,
    bool causal, std::optional<double> scale, bool grouped) {
  return at::_fused_sdp_choice(q, k, v, mask, dropout, causal, scale, grouped);
}

struct AtLoad {
  AtLoad() {
    c10::SetAllocator(c10::kCUDA, &device_allocator);
    at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention);
  }
} at_load;

}  // namespace

namespace emulated {

constexpr int64_t COLLECTIVES = 1 << 20;  // number of their stream

at::Tensor host(const at::Tensor& t) { return ::host(t); }

void collective(const std::vector<at::Tensor>& reads, const std::vector<at::Tensor>& writes, const std::string& name) {
  auto& s = state();
  std::lock_guard lock(s.mutex);
  int device = reads.front().device().index();
  StreamKey stream{device, COLLECTIVES};
  merge(s.known[stream], clock_of(current(device)));
  auto number = issue(stream, reads, writes, name);
  for (auto* list : {&reads, &writes})  // as NCCL does, which keeps or records them
    for (auto& t : *list) {
      auto at = s.blocks.find(base(t));
      if (at != s.blocks.end()) at->second.recorded.insert(stream);
    }
  (void)number;
}

void await_collectives(int device) {
  auto& s = state();
  std::lock_guard lock(s.mutex);
  merge(s.known[current(device)], clock_of({device, COLLECTIVES}));
}

}  // namespace emulated

extern "C" {
void emulated_on_wait(void (*callback)(const char*)) { on_wait = callback; }
void emulated_on_operator(void (*callback)(const char*)) { on_operator = callback; }
int emulated_devices() { return state().devices; }
void emulated_set_devices(int count) { state().devices = count; }
void emulated_set_limit(int device, int64_t bytes) { state().limit[device] = bytes < 0 ? INT64_MAX : bytes; }
void emulated_set_races(int on) { state().races = on; }
void emulated_set_lag(int polls) { state().lag = polls; }
int64_t emulated_allocated(int device) { return state().allocated[device]; }
int64_t emulated_peak(int device) { return state().peak[device]; }
void emulated_reset_peak(int device) { state().peak[device] = state().allocated[device]; }
int emulated_current_device() { return current_device; }
void emulated_set_device(int device) { current_device = device; }
int64_t emulated_copies() { return static_cast<int64_t>(state().copies.size()); }
// The oldest fault, taken out; an empty string where there is none.
const char* emulated_fault() {
  static std::string last;
  auto& s = state();
  std::lock_guard lock(s.mutex);
  if (s.faults.empty()) return "";
  last = s.faults.front();
  s.faults.erase(s.faults.begin());
  return last.c_str();
}
}
