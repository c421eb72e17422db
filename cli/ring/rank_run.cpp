// One rank: fill or read rows, run, compare, write.
#include "ring/rank_run.h"

#include <sys/resource.h>

#include <algorithm>
#include <cstring>
#include <functional>

#include "gpu/gpu.h"
#include "interrupt.h"
#include "random.h"
#include "ring/ranks.h"
#include "ring/ring_check.h"
#include "ring/rows.h"
#include "ring/shared_output.h"

namespace longspan::cli {
namespace {

Json describe_report(const RingReport& report, double seconds) {
  Json events = Json::array();
  for (const RingEvent& event : report.events)
    events.push_back({{"name", event.name}, {"begin", event.begin}, {"end", event.end}});
  return {{"kernel", report.kernel},
          {"bytes_received", report.bytes_received},
          {"bytes_sent", report.bytes_sent},
          {"messages_received", report.messages_received},
          {"messages_sent", report.messages_sent},
          {"header_bytes_sent", report.header_bytes_sent},
          {"rounds", report.rounds},
          {"halo_bytes", report.halo_bytes},
          {"waited_seconds", report.waited_seconds},
          {"overlapped_seconds", report.overlapped_seconds},
          {"seconds", seconds},
          {"began", report.began},
          {"events", events}};
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

ConstTensorView RingInputs::file(std::size_t index) const {
  const Array& array = *files[index];
  std::vector<std::int64_t> shape = array.header.shape;
  if (shape.size() == 3) shape.insert(shape.begin(), 1);
  const bool bnhd = layout == Layout::bnhd;
  return view_of<const void>(array.data, array.header.dtype, layout, shape[0], shape[bnhd ? 1 : 2], shape[bnhd ? 2 : 1],
                             shape[3]);
}

Tensor RingInputs::rows(std::size_t index, std::span<const RowRange> ranges) const {
  Tensor made = host_rows(index, ranges);
  return problem.device.type == DeviceType::cpu ? std::move(made) : made.on(problem.device);
}

Tensor RingInputs::host_rows(std::size_t index, std::span<const RowRange> ranges) const {
  static constexpr const char* kNames[] = {"q", "k", "v", "dout"};
  const std::int64_t heads = index == 1 || index == 2 ? problem.kv_heads : problem.heads;
  std::int64_t count = 0;
  for (const RowRange& range : ranges) count += range.count;
  Tensor tensor(kNames[index], problem.dtype, Layout::bnhd, problem.batch, count, heads, problem.head_dim);
  const TensorView& view = tensor.view();
  if (index < 3 && files[index]) {
    const ConstTensorView whole = file(index);
    for_each_position(ranges, [&](std::int64_t row, std::int64_t position) {
      for (std::int64_t entry = 0; entry < problem.batch; ++entry) {
        for (std::int64_t head = 0; head < heads; ++head) {
          std::memcpy(static_cast<std::byte*>(view.data) + view.offset(entry, row, head) * size_of(view.dtype),
                      row_at(whole, entry, position, head), row_bytes(view));
        }
      }
    });
    return tensor;
  }
  // The numbers that a tensor of the whole sequence would have at these rows.
  const std::int64_t row_elements = heads * problem.head_dim;
  for (std::int64_t entry = 0; entry < problem.batch; ++entry) {
    std::int64_t row = 0;
    for (const RowRange& range : ranges) {
      fill_normal(static_cast<std::byte*>(view.data) + view.offset(entry, row, 0) * size_of(view.dtype), problem.dtype,
                  range.count * row_elements, seed, static_cast<std::uint32_t>(index),
                  (entry * problem.tokens + range.start) * row_elements);
      row += range.count;
    }
  }
  return tensor;
}

bool OneDevice::packs() const {
  Problem problem = inputs_.problem;
  if (problem.device.type == DeviceType::cpu || settings_.shards.ranks() == 1 || settings_.ring.halo_limit_bytes > 0)
    return false;
  const Attention attention(settings_.pattern, settings_.options);
  const auto whole = attention.plan(problem);
  problem.query_rows = settings_.shards.rows(0);
  problem.is_share = true;
  const auto share = attention.plan(problem);
  return !share->kernel_name(Pass::backward).empty() && !share->kernel_name(Pass::forward).empty() &&
         share->kernel_name(Pass::forward) == whole->kernel_name(Pass::forward);
}

std::string OneDevice::kernel(Pass pass) const {
  Problem problem = inputs_.problem;
  problem.query_rows = settings_.shards.rows(0);
  problem.is_share = packs();
  problem.has_pieces = problem.has_piece_gradients = !problem.is_share && settings_.shards.ranks() > 1;
  return std::string(Attention(settings_.pattern, settings_.options).plan(problem)->kernel_name(pass));
}

/// The CPU's kernels give a row the same bits whether its keys come in pieces or not, so there nothing is forced; a
/// GPU's take other tiles then, so it gets one piece that has everything, unless the ring packs strands.
Attention OneDevice::with_rings_kernel(Pass pass) const {
  Options options = settings_.options;
  if (inputs_.problem.device.type == DeviceType::cuda) options.kernel = kernel(pass);
  return Attention(settings_.pattern, options);
}

const OneDevice::Results& OneDevice::results() {
  std::call_once(once_, [&] {
    const Problem& p = inputs_.problem;
    const RowRange all{0, p.tokens};
    const auto make = [&](const char* name, std::int64_t heads) {
      return Tensor(name, p.dtype, Layout::bnhd, p.batch, p.tokens, heads, p.head_dim, p.device);
    };
    Results& r = results_.emplace();
    r.q = inputs_.rows(0, {&all, 1});
    r.k = inputs_.rows(1, {&all, 1});
    r.v = inputs_.rows(2, {&all, 1});
    r.out = make("out", p.heads);
    r.lse = Tensor::lse("lse", p.batch, p.tokens, p.heads, p.dtype == DType::f64 ? DType::f64 : DType::f32, p.device);
    Call call;
    call.cancel = &interrupted();
    call.dropout_seed = inputs_.seed;
    const KeyPiece everything{0, 1, r.k.view(), r.v.view()};
    if (p.device.type == DeviceType::cuda && !packs()) call.pieces = {&everything, 1};
    const auto bring_home = [&](std::initializer_list<Tensor*> tensors) {
      if (p.device.type == DeviceType::cpu) return;
      for (Tensor* const tensor : tensors) *tensor = tensor->on({});
    };
    with_rings_kernel(Pass::forward).forward(r.q.view(), r.k.view(), r.v.view(), r.out.view(), r.lse.view(), call);
    if (!settings_.backward) return bring_home({&r.q, &r.k, &r.v, &r.out, &r.lse});
    r.dout = inputs_.rows(3, {&all, 1});
    r.dq = make("dq", p.heads);
    r.dk = make("dk", p.kv_heads);
    r.dv = make("dv", p.kv_heads);
    with_rings_kernel(Pass::backward)
        .backward(r.q.view(), r.k.view(), r.v.view(), r.out.view(), r.lse.view(), r.dout.view(), r.dq.view(),
                  r.dk.view(), r.dv.view(), call);
    bring_home({&r.q, &r.k, &r.v, &r.dout, &r.out, &r.lse, &r.dq, &r.dk, &r.dv});
  });
  return *results_;
}

namespace {

/// One rank's tensors, and the steps of its run.
class Rank {
 public:
  Rank(const RingInputs& inputs, const RingSettings& settings, const std::shared_ptr<Communicator>& communicator,
       OneDevice& whole)
      : inputs_(inputs),
        settings_(settings),
        communicator_(communicator),
        whole_(whole),
        rank_(communicator ? communicator->rank() : 0),
        ranges_(settings.shards.ranges(rank_)),
        ring_(Attention(settings.pattern, settings.options), communicator, settings.shards, settings.ring) {
    call_.cancel = &interrupted();
    call_.dropout_seed = inputs.seed;
  }

  Json run() {
    begin_output();
    const Problem& p = inputs_.problem;
    q_ = inputs_.rows(0, ranges_);
    k_ = inputs_.rows(1, ranges_);
    v_ = inputs_.rows(2, ranges_);
    out_ = tensor("out", p.heads);
    lse_ = Tensor::lse("lse", p.batch, rows(), p.heads, p.dtype == DType::f64 ? DType::f64 : DType::f32, p.device);
    const auto plan = ring_.plan(q_.view(), k_.view(), call_);
    const ExchangePlan exchange(*plan, settings_.shards, rank_);
    json_ = {{"rank", rank_},
             {"rows", rows()},
             {"planned_bytes_received", exchange.bytes_received()},
             {"planned_bytes_sent", exchange.bytes_sent()}};
    json_.update(forward());
    if (settings_.backward) json_["backward"] = backward();
    std::size_t bytes = 0;
    for (const Tensor* one : {&q_, &k_, &v_, &out_, &lse_, &dout_, &dq_, &dk_, &dv_}) bytes += one->bytes();
    json_["tensor_bytes"] = bytes;
    if (settings_.verify) verify();
    write_output();
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    json_["process_peak_bytes"] = static_cast<std::int64_t>(usage.ru_maxrss) * 1024;
    return std::move(json_);
  }

 private:
  std::int64_t rows() const { return settings_.shards.rows(rank_); }
  Tensor tensor(const char* name, std::int64_t heads) const {
    const Problem& p = inputs_.problem;
    return Tensor(name, p.dtype, Layout::bnhd, p.batch, rows(), heads, p.head_dim, p.device);
  }
  bool on_gpu() const { return inputs_.problem.device.type == DeviceType::cuda; }
  void together() const {
    if (communicator_) barrier(*communicator_, settings_.ring.deadline);
  }

  /// Median time of a call. (A GPU is still computing when the call returns.)
  Json repeat(const std::function<void()>& work) {
    std::vector<double> seconds;
    std::int64_t rounds = 0;
    for (int i = 0; i < settings_.repeat; ++i) {
      together();
      const double on_device = seconds_on(inputs_.problem.device, work);
      seconds.push_back(on_gpu() ? on_device : ring_.report().total_seconds);
      rounds = ring_.report().rounds;
    }
    rounds_ = std::max(rounds_, rounds);
    return describe_report(ring_.report(), median(std::move(seconds)));
  }
  Json forward() {
    return repeat([&] {
      ring_.forward(q_.view(), k_.view(), v_.view(), out_.view(), lse_.view(), call_,
                    settings_.backward ? &halo_ : nullptr);
    });
  }
  Json backward() {
    const Problem& p = inputs_.problem;
    dout_ = inputs_.rows(3, ranges_);
    dq_ = tensor("dq", p.heads);
    dk_ = tensor("dk", p.kv_heads);
    dv_ = tensor("dv", p.kv_heads);
    return repeat([&] {
      ring_.backward(q_.view(), k_.view(), v_.view(), out_.view(), lse_.view(), dout_.view(), dq_.view(), dk_.view(),
                     dv_.view(), call_, &halo_);
    });
  }

  /// The same bits, where nothing is mixed or summed in another order; else equal up to rounding.
  void verify() {
    std::vector<Tensor> copies;
    copies.reserve(5);
    const auto host = [&](const Tensor& there) -> ConstTensorView {
      if (!on_gpu() || there.bytes() == 0) return there.view();
      return copies.emplace_back(there.on({})).view();
    };
    const OneDevice::Results& all = whole_.results();
    const WholeResults whole{all.q.view(),   all.k.view(),  all.v.view(),  all.dout.view(), all.out.view(),
                             all.lse.view(), all.dq.view(), all.dk.view(), all.dv.view()};
    const WholeResults mine{{}, {}, {}, {}, host(out_), host(lse_), host(dq_), host(dk_), host(dv_)};
    const Attention attention(settings_.pattern, settings_.options);
    const bool in_rounds = json_["rounds"].get<std::int64_t>() > 0;
    bool bits = true, verified = true;
    json_["checks"] = Json::array();
    for (const RingCheck& check : check_ring(attention, call_, whole, mine, ranges_, rounds_)) {
      const bool forward = check.name == "out" || check.name == "lse";
      if (forward) bits = bits && check.same_bits;
      verified = verified && check.ok() && (check.same_bits || !forward || in_rounds);
      json_["checks"].push_back(describe(check));
    }
    json_["bit_identical"] = bits;
    json_["verified"] = verified;
  }

  /// Before any work, so that a disk without the space is an error at once.
  void begin_output() {
    if (settings_.out.empty()) return;
    if (rank_ == 0) {
      output_.emplace(settings_.out);
      begin_shared_output(*output_, array());
      output_name_ = output_->written_name();
    }
    if (communicator_) output_name_ = broadcast(*communicator_, output_name_, settings_.ring.deadline);
  }
  void write_output() {
    if (settings_.out.empty()) return;
    const Tensor copy = on_gpu() ? out_.on({}) : Tensor();
    write_shared_rows(output_name_, array(), on_gpu() ? copy.view() : out_.view(), ranges_);
    together();
    if (output_) output_->commit();
  }
  SharedArray array() const { return {inputs_.problem.dtype, inputs_.layout, settings_.out_shape}; }

  const RingInputs& inputs_;
  const RingSettings& settings_;
  const std::shared_ptr<Communicator>& communicator_;
  OneDevice& whole_;
  const int rank_;
  const std::span<const RowRange> ranges_;
  Ring ring_;
  Call call_;
  RingHalo halo_;
  Tensor q_, k_, v_, out_, lse_, dout_, dq_, dk_, dv_;
  std::int64_t rounds_ = 0;
  std::optional<OutputFile> output_;  // rank 0
  std::string output_name_;
  Json json_;
};

}  // namespace

Json run_rank(const RingInputs& inputs, const RingSettings& settings, const std::shared_ptr<Communicator>& communicator,
              OneDevice& whole) {
  return Rank(inputs, settings, communicator, whole).run();
}

}  // namespace longspan::cli
