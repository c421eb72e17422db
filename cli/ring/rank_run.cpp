// One rank: fill or read rows, run, compare, write.
#include "ring/rank_run.h"

#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "gpu/gpu.h"
#include "interrupt.h"
#include "random.h"
#include "ring/mapped_output.h"
#include "ring/ranks.h"
#include "util/half.h"

namespace longspan::cli {
namespace {

std::size_t row_bytes(const ConstTensorView& view) {
  return static_cast<std::size_t>(view.columns() * size_of(view.dtype));
}
const std::byte* row_at(const ConstTensorView& view, std::int64_t entry, std::int64_t row, std::int64_t head) {
  return static_cast<const std::byte*>(view.data) + view.offset(entry, row, head) * size_of(view.dtype);
}

/// body(row of the rank, position) over its rows.
template <class Body>
void for_each_position(std::span<const RowRange> ranges, Body&& body) {
  std::int64_t row = 0;
  for (const RowRange& range : ranges) {
    for (std::int64_t position = range.start; position < range.start + range.count; ++position) body(row++, position);
  }
}

double number(const std::byte* row, DType dtype, std::int64_t column) {
  switch (dtype) {
    case DType::f64:
      return reinterpret_cast<const double*>(row)[column];
    case DType::bf16:
      return to_float(reinterpret_cast<const BFloat16*>(row)[column]);
    case DType::f16:
      return to_float(reinterpret_cast<const Float16*>(row)[column]);
    default:
      return reinterpret_cast<const float*>(row)[column];
  }
}

struct Difference {
  bool same_bits = true;
  double error = 0;  // relative to the largest value
};

Difference compare(const ConstTensorView& mine, const ConstTensorView& whole, std::span<const RowRange> ranges) {
  Difference found;
  double largest = 0, error = 0;
  for_each_position(ranges, [&](std::int64_t row, std::int64_t position) {
    for (std::int64_t entry = 0; entry < mine.batch(); ++entry) {
      for (std::int64_t head = 0; head < mine.heads(); ++head) {
        const std::byte *a = row_at(mine, entry, row, head), *b = row_at(whole, entry, position, head);
        if (std::memcmp(a, b, row_bytes(mine)) != 0) found.same_bits = false;
        for (std::int64_t column = 0; column < mine.columns(); ++column) {
          const double x = number(a, mine.dtype, column), y = number(b, mine.dtype, column);
          if (std::isfinite(y)) largest = std::max(largest, std::abs(y));
          if (x != y) error = std::isfinite(x - y) ? std::max(error, std::abs(x - y)) : INFINITY;
        }
      }
    }
  });
  found.error = error / std::max(largest, 1e-30);
  return found;
}

/// Sums in another order, and one rounding of 16-bit results on either side.
double tolerance(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return 1e-10;
    case DType::bf16:
      return 0x1p-7;
    case DType::f16:
      return 0x1p-10;
    default:
      return 1e-5;
  }
}

Json describe_report(const RingReport& report, double seconds) {
  Json events = Json::array();
  for (const RingEvent& event : report.events)
    events.push_back({{"name", event.name}, {"begin", event.begin}, {"end", event.end}});
  return {{"bytes_received", report.bytes_received},
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

std::string OneDevice::kernel(Pass pass) const {
  Problem problem = inputs_.problem;
  problem.query_rows = settings_.shards.rows(0);
  problem.has_pieces = problem.has_piece_gradients = settings_.shards.ranks() > 1;
  return std::string(Attention(settings_.pattern, settings_.options).plan(problem)->kernel_name(pass));
}

/// The CPU's kernels give a row the same bits whether its keys come in pieces or not, so there nothing is forced; a
/// GPU's take other tiles then, so it gets one piece that has everything.
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
    if (p.device.type == DeviceType::cuda) call.pieces = {&everything, 1};
    const auto bring_home = [&](std::initializer_list<Tensor*> tensors) {
      for (Tensor* const tensor : tensors) *tensor = tensor->on({});
    };
    with_rings_kernel(Pass::forward).forward(r.q.view(), r.k.view(), r.v.view(), r.out.view(), r.lse.view(), call);
    if (!settings_.backward) return bring_home({&r.out, &r.lse});
    r.dout = inputs_.rows(3, {&all, 1});
    r.dq = make("dq", p.heads);
    r.dk = make("dk", p.kv_heads);
    r.dv = make("dv", p.kv_heads);
    with_rings_kernel(Pass::backward)
        .backward(r.q.view(), r.k.view(), r.v.view(), r.out.view(), r.lse.view(), r.dout.view(), r.dq.view(),
                  r.dk.view(), r.dv.view(), call);
    bring_home({&r.out, &r.lse, &r.dq, &r.dk, &r.dv});
  });
  return *results_;
}

Json run_rank(const RingInputs& inputs, const RingSettings& settings, const std::shared_ptr<Communicator>& communicator,
              OneDevice& whole) {
  const int rank = communicator ? communicator->rank() : 0;
  const Problem& p = inputs.problem;
  const auto ranges = settings.shards.ranges(rank);
  const std::int64_t rows = settings.shards.rows(rank);
  const Tensor q = inputs.rows(0, ranges), k = inputs.rows(1, ranges), v = inputs.rows(2, ranges);
  const auto make = [&](const char* name, std::int64_t heads) {
    return Tensor(name, p.dtype, Layout::bnhd, p.batch, rows, heads, p.head_dim, p.device);
  };
  const Tensor out = make("out", p.heads);
  const Tensor lse =
      Tensor::lse("lse", p.batch, rows, p.heads, p.dtype == DType::f64 ? DType::f64 : DType::f32, p.device);
  Call call;
  call.cancel = &interrupted();
  call.dropout_seed = inputs.seed;
  Ring ring(Attention(settings.pattern, settings.options), communicator, settings.shards, settings.ring);
  const auto together = [&] {
    if (communicator) meet(*communicator, settings.ring.deadline);
  };

  const auto plan = ring.plan(q.view(), k.view(), call);
  const ExchangePlan exchange(*plan, settings.shards, rank);
  Json json = {{"rank", rank},
               {"rows", rows},
               {"planned_bytes_received", exchange.bytes_received()},
               {"planned_bytes_sent", exchange.bytes_sent()},
               {"kernel", whole.kernel(Pass::forward)}};
  // A GPU is still computing when the call returns.
  const auto timed = [&](const std::function<void()>& work) {
    if (p.device.type == DeviceType::cuda) return seconds_on(p.device, work);
    work();
    return ring.report().total_seconds;
  };
  std::vector<double> seconds;
  RingHalo halo;
  for (int i = 0; i < settings.repeat; ++i) {
    together();
    seconds.push_back(timed([&] {
      ring.forward(q.view(), k.view(), v.view(), out.view(), lse.view(), call, settings.backward ? &halo : nullptr);
    }));
  }
  const Json forward = describe_report(ring.report(), median(seconds));
  std::size_t tensors = q.bytes() + k.bytes() + v.bytes() + out.bytes() + lse.bytes();
  std::vector<Tensor> gradients;
  if (settings.backward) {
    const Tensor dout = inputs.rows(3, ranges);
    gradients.push_back(make("dq", p.heads));
    gradients.push_back(make("dk", p.kv_heads));
    gradients.push_back(make("dv", p.kv_heads));
    std::vector<double> backward_seconds;
    for (int i = 0; i < settings.repeat; ++i) {
      together();
      backward_seconds.push_back(timed([&] {
        ring.backward(q.view(), k.view(), v.view(), out.view(), lse.view(), dout.view(), gradients[0].view(),
                      gradients[1].view(), gradients[2].view(), call, &halo);
      }));
    }
    json["backward"] = describe_report(ring.report(), median(backward_seconds));
    tensors += dout.bytes() + gradients[0].bytes() + gradients[1].bytes() + gradients[2].bytes();
  }
  for (const auto& [key, value] : forward.items()) json[key] = value;
  json["tensor_bytes"] = tensors;

  if (settings.verify) {
    const OneDevice::Results& want = whole.results();
    const Difference of_out = compare(out.on({}).view(), want.out.view(), ranges),
                     of_lse = compare(lse.on({}).view(), want.lse.view(), ranges);
    const bool bits = of_out.same_bits && of_lse.same_bits;
    double error = std::max(of_out.error, of_lse.error), gradient_error = 0;
    if (settings.backward) {
      const Tensor* expected[] = {&want.dq, &want.dk, &want.dv};
      for (std::size_t i = 0; i < 3; ++i)
        gradient_error =
            std::max(gradient_error, compare(gradients[i].on({}).view(), expected[i]->view(), ranges).error);
      json["gradient_error"] = gradient_error;
    }
    const bool in_rounds = forward["rounds"].get<std::int64_t>() > 0;
    json["bit_identical"] = bits;
    json["largest_error"] = error;
    json["verified"] = (bits || (in_rounds && error <= tolerance(p.dtype))) && gradient_error <= tolerance(p.dtype);
  }
  if (!settings.out.empty()) {
    if (rank == 0) MappedOutput::create(settings.out, p.dtype, settings.out_shape);
    together();
    {
      const Tensor written = p.device.type == DeviceType::cpu ? Tensor() : out.on({});
      const TensorView& source = p.device.type == DeviceType::cpu ? out.view() : written.view();
      const MappedOutput file(settings.out, p.dtype, inputs.layout, settings.out_shape);
      for_each_position(ranges, [&](std::int64_t row, std::int64_t position) {
        for (std::int64_t entry = 0; entry < p.batch; ++entry) {
          for (std::int64_t head = 0; head < p.heads; ++head) {
            std::memcpy(static_cast<std::byte*>(file.view().data) +
                            file.view().offset(entry, position, head) * size_of(p.dtype),
                        row_at(source, entry, row, head), row_bytes(source));
          }
        }
      });
      file.flush();
    }
    together();
    if (rank == 0) MappedOutput::publish(settings.out);
  }
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  json["process_peak_bytes"] = static_cast<std::int64_t>(usage.ru_maxrss) * 1024;
  return json;
}

}  // namespace longspan::cli
