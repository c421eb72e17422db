// Packed strands of a rank: memory, tables and messages that are made once, and the launches of a call. Two launches
// prepare what is sent and two what has arrived; the rest is the attention kernel.
#include "comm/packed.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>

#include "attention/run.h"
#include "comm/gpu/packed_rows.h"
#include "comm/ring_state.h"
#include "device/error.h"
#include "plan/exchange_runs.h"
#include "plan/packed_strands.h"

namespace longspan {
namespace {

using gpu::DeviceMessage;
using gpu::DeviceMessages;
using gpu::HeaderFault;

constexpr int kForward = static_cast<int>(Pass::forward), kBackward = static_cast<int>(Pass::backward);

void launched(cudaError_t status, const char* what) { cuda::check(status, what); }

/// Memory of a stream, whose order all that is made here shares.
struct Place {
  int device;
  void* stream;
  cudaStream_t queue() const { return static_cast<cudaStream_t>(stream); }
  bool operator==(const Place&) const = default;
};

/// A list on the device. The caller's may change when this returns.
template <class Entry>
class Uploaded {
 public:
  Uploaded(const Place& place, const std::vector<Entry>& list)
      : memory_(place.device, place.stream, list.size() * sizeof(Entry)) {
    if (!list.empty()) update(place, list);
  }
  const Entry* data() const { return reinterpret_cast<const Entry*>(memory_.data()); }
  /// Of as many entries.
  void update(const Place& place, const std::vector<Entry>& list) {
    launched(cudaMemcpyAsync(memory_.data(), list.data(), list.size() * sizeof(Entry), cudaMemcpyHostToDevice,
                             place.queue()),
             "copying tables of a ring to the GPU");
  }

 private:
  DeviceLease memory_;
};

struct UploadedSums {
  Uploaded<std::int32_t> targets, first, sources;
  std::int64_t count;
  UploadedSums(const Place& place, const RowSums& sums)
      : targets(place, sums.targets),
        first(place, sums.first),
        sources(place, sums.sources),
        count(static_cast<std::int64_t>(sums.targets.size())) {}
  gpu::DeviceSums get() const { return {targets.data(), first.data(), sources.data(), count}; }
};

/// What one exchange moves, as the host and as the device knows it.
struct Exchanged {
  Messages messages;
  std::vector<DeviceMessage> list;
  Uploaded<DeviceMessage> uploaded;
  std::vector<const void*> lent;  // where what is received lies: here, or in its sender's memory

  Exchanged(const Place& place, const MessageMemory& memory, const ExchangePlan& exchange, bool gradients)
      : messages(make(memory, exchange, gradients)),
        list(list_of(messages, gradients ? exchange.gradient_bytes_per_pair() : exchange.bytes_per_pair())),
        uploaded(place, list),
        lent(messages.receives.size()) {}
  void keep_all() {
    for (std::size_t i = 0; i < lent.size(); ++i) lent[i] = messages.receives[i].data();
  }
  /// After messages have arrived. Where they lie changes with their senders' memory only.
  void find(const Place& place) {
    bool moved = false;
    for (std::size_t i = 0; i < lent.size(); ++i) {
      char*& payload = list[messages.sends.size() + i].payload;
      char* const found = static_cast<char*>(const_cast<void*>(lent[i])) + sizeof(MessageHeader);
      moved = moved || payload != found;
      payload = found;
    }
    if (moved) uploaded.update(place, list);
  }
  DeviceMessages sends() const { return {uploaded.data(), static_cast<int>(messages.sends.size())}; }
  DeviceMessages receives() const {
    return {uploaded.data() + messages.sends.size(), static_cast<int>(messages.receives.size())};
  }

 private:
  static Messages make(const MessageMemory& memory, const ExchangePlan& exchange, bool gradients) {
    Messages made;
    const std::int64_t bytes = gradients ? exchange.gradient_bytes_per_pair() : exchange.bytes_per_pair();
    const auto add = [&](std::vector<MessageBuffer>& to, int peer, std::int64_t pairs) {
      if (pairs > 0) to.emplace_back(peer, pairs * bytes, memory);
    };
    for (const ExchangePeer& peer : exchange.peers()) {
      add(made.sends, peer.rank, gradients ? peer.receive_pairs : peer.send_pairs);
      add(made.receives, peer.rank, gradients ? peer.send_pairs : peer.receive_pairs);
    }
    return made;
  }
  static std::vector<DeviceMessage> list_of(const Messages& messages, std::int64_t bytes_per_pair) {
    std::vector<DeviceMessage> list;
    for (const auto* side : {&messages.sends, &messages.receives}) {
      std::int64_t first = 0;
      for (const MessageBuffer& message : *side) {
        const std::int64_t pairs = message.bytes() / bytes_per_pair;
        list.push_back({reinterpret_cast<char*>(message.payload()), first, pairs, message.size(), message.peer()});
        first += pairs;
      }
    }
    return list;
  }
};

/// K and V of packed strands.
struct PackedMemory {
  ScratchTensor k, v;
  PackedMemory(const Place& place, const Problem& problem, std::int64_t rows)
      : k({DeviceType::cuda, place.device}, place.stream, problem.dtype, problem.batch, rows, 1, problem.head_dim),
        v({DeviceType::cuda, place.device}, place.stream, problem.dtype, problem.batch, rows, 1, problem.head_dim) {}
};

/// Memory that is lent to one forward after the other, or to several that wait for their backward.
class SparePacked {
 public:
  std::unique_ptr<PackedMemory> take() {
    const std::lock_guard lock(mutex_);
    if (spare_.empty()) return nullptr;
    auto memory = std::move(spare_.back());
    spare_.pop_back();
    return memory;
  }
  void give_back(std::unique_ptr<PackedMemory> memory) {
    const std::lock_guard lock(mutex_);
    spare_.push_back(std::move(memory));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<PackedMemory>> spare_;
};

struct KeptOnGpu final : KeptStrands {
  std::shared_ptr<SparePacked> spare;
  std::unique_ptr<PackedMemory> memory;
  ~KeptOnGpu() override { spare->give_back(std::move(memory)); }
  std::int64_t bytes() const override { return static_cast<std::int64_t>(memory->k.bytes() + memory->v.bytes()); }
};

/// Everything in the memory of one stream.
struct OnStream {
  const Place place;
  const std::int64_t packed_rows;
  const Uploaded<std::int32_t> places, sends, sources;
  const UploadedSums returned, own;
  Exchanged rows;
  std::optional<Exchanged> gradients;  // these three from the first backward on
  std::optional<DeviceLease> sums;
  std::optional<DeviceLease> workspace[2];
  std::size_t workspace_bytes[2] = {};
  const DeviceLease seal_memory;
  gpu::SealScratch seals;
  const std::shared_ptr<SparePacked> spare = std::make_shared<SparePacked>();

  OnStream(const Place& where, const PackedPlan& tables, const ExchangePlan& exchange, const MessageMemory& memory)
      : place(where),
        packed_rows(std::max<std::int64_t>(tables.rows, 1)),
        places(where, tables.places),
        sends(where, tables.sends),
        sources(where, tables.sources.empty() ? std::vector<std::int32_t>{PackedPlan::kZeros} : tables.sources),
        returned(where, tables.returned),
        own(where, tables.own),
        rows(where, memory, exchange, false),
        seal_memory(where.device, where.stream, seal_bytes(exchange)) {
    const std::size_t peers = exchange.peers().size();
    seals = {reinterpret_cast<unsigned long long*>(seal_memory.data()),
             reinterpret_cast<unsigned*>(seal_memory.data() + peers * sizeof(unsigned long long))};
    if (peers > 0)
      launched(cudaMemsetAsync(seal_memory.data(), 0, seal_bytes(exchange), where.queue()), "clearing a ring's sums");
  }
  static std::size_t seal_bytes(const ExchangePlan& exchange) {
    return exchange.peers().size() * (sizeof(unsigned long long) + sizeof(unsigned));
  }
  std::byte* workspace_of(int pass, std::size_t bytes) {
    if (!workspace[pass] || bytes > workspace_bytes[pass]) {
      workspace[pass].reset();
      workspace[pass].emplace(place.device, place.stream, bytes);
      workspace_bytes[pass] = bytes;
    }
    return workspace[pass]->data();
  }
};

gpu::StridedRows strided(const ConstTensorView& view) {
  const std::int64_t size = size_of(view.dtype);
  return {static_cast<char*>(const_cast<void*>(view.data)), view.strides[0] * size, view.strides[1] * size,
          view.strides[2] * size};
}

class Exchange final : public PackedExchange {
 public:
  Exchange(const Attention& attention, const RingPlan& plan, const Problem& share,
           std::shared_ptr<Communicator> communicator)
      : attention_(attention),
        exchange_(plan.exchange),
        tables_(*plan.plan, *plan.exchange),
        share_(share),
        communicator_(std::move(communicator)),
        fault_memory_(sizeof(HeaderFault)) {
    *fault() = {};
  }
  ~Exchange() override {
    // Peers may still copy what was sent.
    try {
      if (communicator_->failure().empty())
        communicator_->settle(std::chrono::steady_clock::now() + std::chrono::seconds(1));
    } catch (const std::exception&) {  // they failed; what they would have copied does not matter
    }
  }

  std::unique_ptr<PackedCall> forward(const Context& context, const ForwardTensors& tensors,
                                      std::shared_ptr<KeptStrands>* keep) override;
  std::unique_ptr<PackedCall> backward(const Context& context, const BackwardTensors& tensors,
                                       std::shared_ptr<KeptStrands> kept) override;

  bool busy() const override { return memory_ && gpu::busy(memory_->place.device, memory_->place.stream); }
  std::string late_error(bool take) override {
    HeaderFault* const found = fault();
    const int kind = std::atomic_ref(found->kind).load();
    if (kind == HeaderFault::none) return {};
    const std::string what = kind == HeaderFault::magic    ? "sent something that is no message"
                             : kind == HeaderFault::digest ? std::string(kComputesSomethingElse)
                             : kind == HeaderFault::step   ? fmt::format("is at step {}", found->found)
                             : kind == HeaderFault::bytes  ? fmt::format("sent {} bytes", found->found)
                                                           : "sent a message that arrived changed";
    const std::string text = fmt::format("an earlier exchange of a ring (step {}) on rank {}: rank {} {}",
                                         found->at_step, communicator_->rank(), found->peer, what);
    if (take) std::atomic_ref(found->kind).store(HeaderFault::none);
    return text;
  }

  OnStream& memory(const MessageRules& rules) {
    const Place place{share_.device.index, rules.memory.stream};
    if (!memory_ || !(memory_->place == place)) {
      // Peers may still read what was sent from the other stream's memory.
      if (memory_ && communicator_->failure().empty())
        communicator_->settle(std::chrono::steady_clock::now() + rules.deadline);
      memory_.reset();
      memory_.emplace(place, tables_, *exchange_, rules.memory);
    }
    return *memory_;
  }
  std::shared_ptr<KeptOnGpu> take_packed(OnStream& on) const {
    auto rows = std::make_shared<KeptOnGpu>();
    rows->spare = on.spare;
    rows->memory = on.spare->take();
    if (!rows->memory) rows->memory = std::make_unique<PackedMemory>(on.place, share_, on.packed_rows);
    return rows;
  }
  HeaderFault* fault() const { return reinterpret_cast<HeaderFault*>(fault_memory_.data()); }

  const Attention attention_;
  const std::shared_ptr<const ExchangePlan> exchange_;
  const PackedPlan tables_;
  const Problem share_;
  const std::shared_ptr<Communicator> communicator_;

 private:
  const gpu::PinnedLease fault_memory_;
  std::optional<OnStream> memory_;
};

/// What both passes do.
class CallBase : public PackedCall {
 protected:
  CallBase(Exchange& exchange, const PackedExchange::Context& context, const ConstTensorView& k,
           const ConstTensorView& v)
      : exchange_(exchange),
        c_(context),
        on_(exchange.memory(context.rules)),
        k_(k),
        v_(v),
        call_(with_ranges(context.call, context.ranges)) {}

  template <class Run>
  void on_device(const char* what, Run&& run) {
    const cuda::DeviceGuard guard(on_.place.device);
    launched(run(on_.place.queue()), what);
  }
  gpu::HeaderRules header_rules() const {
    return {kMessageMagic, c_.rules.digest, step_->step(), exchange_.communicator_->rank(), c_.rules.checksums};
  }
  gpu::RankRows rank_rows() const {
    const PackedMemory& packed = *packed_->memory;
    return {strided(k_),
            strided(v_),
            static_cast<char*>(packed.k.view().data),
            static_cast<char*>(packed.v.view().data),
            k_.batch(),
            on_.packed_rows,
            static_cast<int>(k_.heads()),
            static_cast<int>(k_.columns() * size_of(k_.dtype))};
  }

  void begin(Exchanged& what, const char* name, const std::function<void(cudaStream_t)>& fill) {
    what.messages.count(c_.report);
    step_.emplace(*exchange_.communicator_, c_.rules, name);
    c_.clock.working("pack and send", [&] {
      if (c_.rules.in_order) step_->settle();
      const cuda::DeviceGuard guard(on_.place.device);
      fill(on_.place.queue());
      if (c_.rules.in_order)
        launched(gpu::start_seal(what.sends(), header_rules(), on_.seals, on_.place.queue()), "sealing messages");
      if (c_.rules.in_order) what.keep_all();
      step_->begin(what.messages.sends, what.messages.receives,
                   c_.rules.in_order ? std::span(what.lent) : std::span<const void*>());
    });
  }
  /// Ends an exchange: use(stream) reads what has arrived.
  template <class Use>
  void finish(Exchanged& what, Use&& use) {
    struct Borrowed {
      Communicator& communicator;
      ~Borrowed() { communicator.release(); }
    };
    const Borrowed borrowed{*exchange_.communicator_};
    receive(what);
    const cuda::DeviceGuard guard(on_.place.device);
    use(on_.place.queue());
  }
  void receive(Exchanged& what) {
    if (!c_.rules.in_order) return c_.clock.waiting("wait", [&] { step_->finish(); });
    c_.clock.working("wait", [&] { step_->finish(); });
    what.find(on_.place);
    on_device("checking messages of a ring", [&](cudaStream_t stream) {
      return gpu::start_check(what.receives(), header_rules(), on_.seals, exchange_.fault(), stream);
    });
  }

  void send_rows(const char* name) {
    packed_ = exchange_.take_packed(on_);
    begin(on_.rows, name, [&](cudaStream_t stream) {
      launched(gpu::start_send(on_.rows.sends(), on_.sends.data(),
                               static_cast<std::int64_t>(exchange_.tables_.sends.size()), rank_rows(), stream),
               "packing messages of a ring");
    });
  }
  void receive_rows() {
    finish(on_.rows, [&](cudaStream_t stream) {
      launched(gpu::start_pack(on_.rows.receives(), on_.sources.data(), rank_rows(), stream),
               "packing strands of a ring");
    });
  }
  PackedStrands packed_strands() const {
    return {packed_->memory->k.view(), packed_->memory->v.view(), on_.places.data(), exchange_.tables_.range_places};
  }
  const Plan& plan(Pass pass) {
    share_plan_ = exchange_.attention_.plan(exchange_.share_);
    choice_ = KernelChoice::of(*share_plan_);
    choice_->require(pass);
    return *share_plan_;
  }
  template <class Arguments>
  void run(void (*Kernel::*pass)(const Arguments&), Pass which, Arguments arguments) {
    if (arguments.q.rows() == 0 || arguments.q.batch() == 0) return;
    const Kernel& kernel = choice_->taking(which, arguments);
    arguments.workspace = on_.workspace_of(static_cast<int>(which), kernel.workspace_bytes(arguments.plan, which, 1));
    c_.clock.working("attention", [&] { (kernel.*pass)(arguments); });
    if (c_.call.report) c_.call.report->kernel = kernel.name;
  }

  Exchange& exchange_;
  const PackedExchange::Context c_;
  OnStream& on_;
  const ConstTensorView k_, v_;
  const Call call_;
  std::shared_ptr<KeptOnGpu> packed_;
  std::optional<MessageStep> step_;
  std::shared_ptr<const Plan> share_plan_;
  std::shared_ptr<const KernelChoice> choice_;
};

class ForwardCall final : public CallBase {
 public:
  ForwardCall(Exchange& exchange, const PackedExchange::Context& context, const ForwardTensors& tensors,
              std::shared_ptr<KeptStrands>* keep)
      : CallBase(exchange, context, tensors.k, tensors.v), t_(tensors), keep_(keep) {
    // Networks leave time for what needs no remote row. In two chunks of a zigzag some of that is packed, too.
    if (!c_.rules.in_order && c_.ranges.size() == 1)
      windows_ = split_windows(plan(Pass::forward), *exchange_.exchange_, c_.ranges);
  }
  int phases() const override { return 2; }
  void phase(int index) override {
    if (index == 0) {
      send_rows("ring forward, exchange of rows");
      if (windows_) attend({windows_->local, true, false});
      return;
    }
    receive_rows();
    c_.report.halo_bytes = total_bytes(on_.rows.messages.receives) + packed_->bytes();
    if (windows_) attend({windows_->remote, false, true});
    else attend({});
    if (keep_) *keep_ = packed_;
    packed_.reset();
  }

 private:
  void attend(const ForwardPart& part) {
    const PackedStrands packed = packed_strands();
    run(&Kernel::forward, Pass::forward,
        ForwardArguments{plan(Pass::forward), call_, call_.query_ranges, t_.q, t_.k, t_.v, t_.out, t_.lse, 1, nullptr,
                         windows_ ? &part : nullptr, 0, &packed});
  }
  std::optional<WindowsByNeed> windows_;
  const ForwardTensors t_;
  std::shared_ptr<KeptStrands>* const keep_;
};

class BackwardCall final : public CallBase {
 public:
  BackwardCall(Exchange& exchange, const PackedExchange::Context& context, const BackwardTensors& tensors,
               std::shared_ptr<KeptStrands> kept)
      : CallBase(exchange, context, tensors.k, tensors.v), t_(tensors), fetches_(!kept) {
    packed_ = std::static_pointer_cast<KeptOnGpu>(std::move(kept));
    if (!on_.gradients) on_.gradients.emplace(on_.place, c_.rules.memory, *exchange_.exchange_, true);
    if (!on_.sums) on_.sums.emplace(on_.place.device, on_.place.stream, 2 * floats() * sizeof(float));
  }
  int phases() const override { return fetches_ ? 4 : 2; }
  // A rank sends again only after all have taken its rows: in one thread, that is the phase after.
  void phase(int index) override {
    if (index == phases() - 1) return collect();
    if (fetches_ && index == 0) return send_rows("ring backward, exchange of rows");
    if (fetches_ && index == 1) return receive_rows();
    compute();
    packed_.reset();
    begin(*on_.gradients, "ring backward, return of gradients", [&](cudaStream_t stream) {
      launched(gpu::start_return(on_.gradients->sends(), on_.returned.get(), rank_sums(), stream),
               "packing gradients of a ring");
    });
  }

 private:
  std::size_t floats() const {
    return static_cast<std::size_t>(k_.batch() * (k_.heads() * k_.rows() + on_.packed_rows) * k_.columns());
  }
  gpu::RankSums rank_sums() const {
    float* const dk = reinterpret_cast<float*>(on_.sums->data());
    return {dk,
            dk + floats(),
            k_.batch(),
            k_.rows(),
            on_.packed_rows,
            static_cast<int>(k_.heads()),
            static_cast<int>(k_.columns())};
  }
  void compute() {
    c_.report.halo_bytes = total_bytes(on_.rows.messages.receives) + packed_->bytes() +
                           total_bytes(on_.gradients->messages.sends) + total_bytes(on_.gradients->messages.receives) +
                           2 * k_.batch() * on_.packed_rows * k_.columns() * static_cast<std::int64_t>(sizeof(float));
    on_device("clearing sums of a ring", [&](cudaStream_t stream) {
      return cudaMemsetAsync(on_.sums->data(), 0, 2 * floats() * sizeof(float), stream);
    });
    PackedStrands packed = packed_strands();
    packed.dk_sum = rank_sums().dk, packed.dv_sum = rank_sums().dv;
    run(&Kernel::backward, Pass::backward,
        BackwardArguments{plan(Pass::backward),
                          call_,
                          call_.query_ranges,
                          t_.q,
                          t_.k,
                          t_.v,
                          t_.out,
                          t_.lse,
                          t_.dout,
                          t_.dq,
                          {},
                          {},
                          1,
                          nullptr,
                          &packed});
  }
  void collect() {
    finish(*on_.gradients, [&](cudaStream_t stream) {
      launched(gpu::start_collect(on_.gradients->receives(), on_.own.get(), rank_sums(), stream),
               "adding gradients of a ring");
    });
    on_device("writing gradients of a ring", [&](cudaStream_t stream) {
      return gpu::start_finish(rank_sums(), t_.dk.dtype, strided(t_.dk), strided(t_.dv), stream);
    });
  }

  const BackwardTensors t_;
  const bool fetches_;
};

std::unique_ptr<PackedCall> Exchange::forward(const Context& context, const ForwardTensors& tensors,
                                              std::shared_ptr<KeptStrands>* keep) {
  return std::make_unique<ForwardCall>(*this, context, tensors, keep);
}

std::unique_ptr<PackedCall> Exchange::backward(const Context& context, const BackwardTensors& tensors,
                                               std::shared_ptr<KeptStrands> kept) {
  return std::make_unique<BackwardCall>(*this, context, tensors, std::move(kept));
}

}  // namespace

std::shared_ptr<PackedExchange> PackedExchange::make(const Attention& attention, const RingPlan& plan,
                                                     const Problem& share, std::shared_ptr<Communicator> communicator) {
  if (share.batch == 0) return nullptr;  // nothing to move
  const auto choice = KernelChoice::of(*attention.plan(share));
  if (choice->of(Pass::forward).empty() || choice->of(Pass::backward).empty()) return nullptr;
  // One device splits few query rows over their keys, which gives other bits; ranks do so with pieces.
  const auto whole = KernelChoice::of(*plan.plan);
  if (whole->of(Pass::forward).empty() || whole->of(Pass::forward).front() != choice->of(Pass::forward).front())
    return nullptr;
  try {
    return std::make_shared<Exchange>(attention, plan, share, std::move(communicator));
  } catch (const Unsupported&) {  // then keys come in pieces, to the kernels that take those
    return nullptr;
  }
}

}  // namespace longspan
