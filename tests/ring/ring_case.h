// One attention problem over a ring: every rank a thread (or this process one rank), results gathered and compared with
// one device.
#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <thread>

#include "longspan/communicator.h"
#include "longspan/error.h"
#include "longspan/ring.h"
#include "support/case.h"

namespace longspan::testing {

/// Rows `ranges` of a tensor, copied one behind the other.
inline Tensor rows_at(const Tensor& whole, std::span<const RowRange> ranges) {
  const ConstTensorView from = whole.view();
  std::int64_t rows = 0;
  for (const RowRange& range : ranges) rows += range.count;
  Tensor part(from.dtype, from.batch(), rows, from.heads(), from.columns());
  std::int64_t row = 0;
  for (const RowRange& range : ranges) {
    for (std::int64_t position = range.start; position < range.start + range.count; ++position, ++row) {
      for (std::int64_t entry = 0; entry < from.batch(); ++entry) {
        for (std::int64_t head = 0; head < from.heads(); ++head) {
          std::memcpy(
              static_cast<std::byte*>(part.view().data) + part.view().offset(entry, row, head) * size_of(from.dtype),
              static_cast<const std::byte*>(from.data) + from.offset(entry, position, head) * size_of(from.dtype),
              static_cast<std::size_t>(from.columns() * size_of(from.dtype)));
        }
      }
    }
  }
  return part;
}

/// What one rank got.
struct RankResults {
  Results results;
  RingReport forward, backward;
};

struct RingRun {
  RingOptions options;
  bool keep_halo = true;
  bool gradients = true;
  std::string kernel;
};

/// Where a rank's tensors are: as they come. Another place has the same functions.
struct HostPlace {
  ConstTensorView input(const Tensor& tensor) { return tensor.view(); }
  TensorView output(Tensor& tensor) { return tensor.view(); }
  Call call(const Call& call) { return call; }
  /// Results are read after this.
  void finish() {}
};

/// The calls of one rank.
template <class Place = HostPlace>
RankResults run_rank(const Case& c, const Shards& shards, std::shared_ptr<Communicator> communicator,
                     const RingRun& run, Place place = {}) {
  Options chosen = c.options;
  chosen.kernel = run.kernel;
  const int rank = communicator ? communicator->rank() : 0;
  const auto ranges = shards.ranges(rank);
  Ring ring(Attention(c.pattern, chosen), std::move(communicator), shards, run.options);
  const Tensor q = rows_at(c.q, ranges), k = rows_at(c.k, ranges), v = rows_at(c.v, ranges),
               dout = rows_at(c.dout, ranges);
  const std::int64_t rows = shards.rows(rank);
  RankResults got;
  Results& r = got.results;
  const auto like = [&](std::int64_t heads) { return Tensor(c.dtype, c.shape.batch, rows, heads, c.shape.head_dim); };
  r.out = like(c.shape.heads);
  r.lse = Tensor::lse(c.dtype, c.shape.batch, rows, c.shape.heads);
  Call call = c.call();
  call.dlse = {};
  call = place.call(call);
  RingHalo halo;
  const ConstTensorView q_view = place.input(q), k_view = place.input(k), v_view = place.input(v);
  const TensorView out = place.output(r.out), lse = place.output(r.lse);
  ring.forward(q_view, k_view, v_view, out, lse, call, run.keep_halo ? &halo : nullptr);
  got.forward = ring.report();
  ring.check(run.options.deadline);
  if (!run.gradients) {
    place.finish();
    return got;
  }
  r.dq = like(c.shape.heads);
  r.dk = like(c.shape.kv_heads);
  r.dv = like(c.shape.kv_heads);
  std::optional<Tensor> dlse;
  if (c.dlse) {
    dlse = Tensor::lse(c.dtype, c.shape.batch, rows, c.shape.heads);
    std::int64_t row = 0;
    for (const RowRange& range : ranges) {
      for (std::int64_t position = range.start; position < range.start + range.count; ++position, ++row) {
        for (std::int64_t entry = 0; entry < c.shape.batch; ++entry) {
          for (std::int64_t head = 0; head < c.shape.heads; ++head) {
            std::memcpy(static_cast<std::byte*>(dlse->view().data) +
                            dlse->view().offset(entry, row, head) * size_of(dlse->view().dtype),
                        static_cast<const std::byte*>(c.dlse->view().data) +
                            c.dlse->view().offset(entry, position, head) * size_of(dlse->view().dtype),
                        static_cast<std::size_t>(size_of(dlse->view().dtype)));
          }
        }
      }
    }
    call.dlse = place.input(*dlse);
  }
  const TensorView dq = place.output(r.dq), dk = place.output(r.dk), dv = place.output(r.dv);
  ring.backward(q_view, k_view, v_view, out, lse, place.input(dout), dq, dk, dv, call, run.keep_halo ? &halo : nullptr);
  got.backward = ring.report();
  ring.check(run.options.deadline);
  place.finish();
  return got;
}

/// Runs body(rank, communicator) on one thread per rank; errors are returned, one per rank.
inline std::vector<std::exception_ptr> on_ranks(std::vector<std::shared_ptr<Communicator>> ring,
                                                const std::function<void(int, std::shared_ptr<Communicator>)>& body) {
  std::vector<std::exception_ptr> errors(ring.size());
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < ring.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(static_cast<int>(rank), ring[rank]);
      } catch (...) {
        errors[rank] = std::current_exception();
      }
      ring[rank].reset();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

/// What the errors of on_ranks say; empty where a rank had none. Those of another type are thrown.
template <class Kind = std::exception>
std::vector<std::string> texts_of(std::span<const std::exception_ptr> errors) {
  std::vector<std::string> texts;
  for (const auto& error : errors) {
    texts.emplace_back();
    try {
      if (error) std::rethrow_exception(error);
    } catch (const Kind& found) {
      texts.back() = found.what();
    }
  }
  return texts;
}

/// All ranks of a ring in this process; throws what all errors say.
template <class Place = HostPlace>
std::vector<RankResults> run_ranks(const Case& c, const Shards& shards, const RingRun& run,
                                   std::vector<std::shared_ptr<Communicator>> ring) {
  std::vector<RankResults> results(static_cast<std::size_t>(shards.ranks()));
  const auto errors = on_ranks(std::move(ring), [&](int rank, std::shared_ptr<Communicator> communicator) {
    results[static_cast<std::size_t>(rank)] = run_rank<Place>(c, shards, std::move(communicator), run);
  });
  std::string all;
  for (const std::string& text : texts_of(errors)) all += text.empty() ? "" : text + "\n";
  if (!all.empty()) throw CommError(all);
  return results;
}

template <class Place = HostPlace>
std::vector<RankResults> run_local(const Case& c, const Shards& shards, const RingRun& run = {},
                                   std::uint64_t shuffle = 0, std::vector<LocalFault> faults = {}) {
  return run_ranks<Place>(c, shards, run, local_ring(shards.ranks(), std::move(faults), shuffle));
}

inline std::string bits_differ(const Tensor& got, const Tensor& want) {
  const ConstTensorView a = got.view(), b = want.view();
  for (std::int64_t entry = 0; entry < a.batch(); ++entry) {
    for (std::int64_t row = 0; row < a.rows(); ++row) {
      for (std::int64_t head = 0; head < a.heads(); ++head) {
        if (std::memcmp(static_cast<const std::byte*>(a.data) + a.offset(entry, row, head) * size_of(a.dtype),
                        static_cast<const std::byte*>(b.data) + b.offset(entry, row, head) * size_of(b.dtype),
                        static_cast<std::size_t>(a.columns() * size_of(a.dtype))) != 0) {
          return fmt::format("entry {} row {} head {}", entry, row, head);
        }
      }
    }
  }
  return "";
}

/// Compares every output of a rank with the rows that one device computed: bits forward, `tolerance` relative to the
/// largest value for the rest.
inline void expect_same(const RankResults& got, const Results& want, std::span<const RowRange> ranges, double tolerance,
                        bool bits, bool gradients, const std::string& what) {
  const auto close = [&](const char* name, const Tensor& actual, const Tensor& whole) {
    const Tensor expected = rows_at(whole, ranges);
    double largest = 0, error = 0;
    for (std::int64_t entry = 0; entry < expected.view().batch(); ++entry) {
      for (std::int64_t row = 0; row < expected.view().rows(); ++row) {
        for (std::int64_t head = 0; head < expected.view().heads(); ++head) {
          for (std::int64_t column = 0; column < expected.view().columns(); ++column) {
            const double a = actual.at(entry, row, head, column), b = expected.at(entry, row, head, column);
            if (std::isfinite(b)) largest = std::max(largest, std::abs(b));
            if (a == b) continue;  // infinities of rows without keys
            error = std::max(error, std::isfinite(a - b) ? std::abs(a - b) : INFINITY);
          }
        }
      }
    }
    EXPECT_LE(error, tolerance * largest) << name << " " << what;
  };
  if (bits) {
    EXPECT_EQ(bits_differ(got.results.out, rows_at(want.out, ranges)), "") << "out " << what;
    EXPECT_EQ(bits_differ(got.results.lse, rows_at(want.lse, ranges)), "") << "lse " << what;
  } else {
    close("out", got.results.out, want.out);
    close("lse", got.results.lse, want.lse);
  }
  if (!gradients) return;
  close("dq", got.results.dq, want.dq);
  close("dk", got.results.dk, want.dk);
  close("dv", got.results.dv, want.dv);
}

}  // namespace longspan::testing
