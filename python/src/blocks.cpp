// BlockMask, BlockPattern and inspection for Python: values that NumPy can look into.
#include <fmt/format.h>
#include <nanobind/ndarray.h>
#include <nanobind/operators.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "arrays.h"
#include "bindings.h"
#include "longspan/error.h"
#include "longspan/inspect.h"
#include "longspan/picture.h"
#include "refusal.h"

namespace longspan::python {
namespace {

using namespace nb::literals;
using BooleanArray = nb::ndarray<const bool, nb::c_contig, nb::device::cpu, nb::ro>;
using Ranges = std::vector<std::pair<std::int64_t, std::int64_t>>;

/// mask[heads, blocks, blocks] or [blocks, blocks].
BlockMask block_mask(const BooleanArray& mask, int block_size) {
  const std::size_t dimensions = mask.ndim();
  if (dimensions != 2 && dimensions != 3) {
    throw InvalidArgument(
        "mask", fmt::format("mask has {} dimensions: give [blocks, blocks] or [heads, blocks, blocks]", dimensions));
  }
  const auto rows = static_cast<std::int64_t>(mask.shape(dimensions - 2));
  const auto columns = static_cast<std::int64_t>(mask.shape(dimensions - 1));
  if (rows != columns) {
    throw InvalidArgument("mask",
                          fmt::format("mask has {} block rows and {} block columns: give a square one", rows, columns));
  }
  const auto heads = dimensions == 3 ? static_cast<std::int64_t>(mask.shape(0)) : 1;
  return BlockMask::from_dense(block_size, heads, rows,
                               {reinterpret_cast<const std::uint8_t*>(mask.data()), mask.size()});
}

/// An array that owns what was moved into it.
template <class Value, class Stored>
nb::object owned_array(std::vector<Stored> values, std::vector<std::size_t> shape) {
  auto* const held = new std::vector<Stored>(std::move(values));
  nb::capsule owner(held, [](void* pointer) noexcept { delete static_cast<std::vector<Stored>*>(pointer); });
  return nb::cast(nb::ndarray<nb::numpy, Value>(held->data(), shape.size(), shape.data(), owner));
}

nb::object to_dense(const BlockMask& mask) {
  const auto blocks = static_cast<std::size_t>(mask.blocks());
  return owned_array<bool>(mask.to_dense(), {static_cast<std::size_t>(mask.heads()), blocks, blocks});
}

void check_index(const BlockMask& mask, std::int64_t head, std::int64_t block) {
  if (head < 0 || (head >= mask.heads() && mask.heads() != 1) || block < 0 || block >= mask.blocks()) {
    throw InvalidArgument("block_row", fmt::format("head {}, block {}: the mask has heads 0 to {} and blocks 0 to {}",
                                                   head, block, mask.heads() - 1, mask.blocks() - 1));
  }
}

std::vector<std::int32_t> copied(std::span<const std::int32_t> list) { return {list.begin(), list.end()}; }

/// (head, block row, block column) of every active block.
nb::object indices(const BlockMask& mask) {
  std::vector<std::int64_t> flat;
  flat.reserve(static_cast<std::size_t>(3 * mask.active_blocks()));
  for (std::int64_t head = 0; head < mask.heads(); ++head) {
    for (std::int64_t row = 0; row < mask.blocks(); ++row) {
      for (const std::int32_t column : mask.row(head, row)) flat.insert(flat.end(), {head, row, column});
    }
  }
  return owned_array<std::int64_t>(std::move(flat), {static_cast<std::size_t>(mask.active_blocks()), 3});
}

void bind_mask(nb::module_& module) {
  nb::class_<BlockMask> bound(module, "BlockMask", "Which key blocks each block row sees. Immutable.");
  bound
      .def(
          "__init__",
          [](BlockMask* self, const BooleanArray& mask, int block_size) {
            new (self) BlockMask(block_mask(mask, block_size));
          },
          "mask"_a, "block_size"_a)
      .def_static("from_rows", &BlockMask::from_rows, "block_size"_a, "heads"_a, "blocks"_a, "rows"_a,
                  "rows[head * blocks + I]: active key blocks of block row I, ascending.")
      .def_prop_ro("block_size", &BlockMask::block_size)
      .def_prop_ro("heads", &BlockMask::heads)
      .def_prop_ro("blocks", &BlockMask::blocks)
      .def_prop_ro("active_blocks", &BlockMask::active_blocks)
      .def_prop_ro("density", &BlockMask::density, "Fraction of blocks kept.")
      .def(
          "active",
          [](const BlockMask& mask, std::int64_t head, std::int64_t row, std::int64_t column) {
            check_index(mask, head, row);
            check_index(mask, head, column);
            return mask.active(head, row, column);
          },
          "head"_a, "block_row"_a, "block_column"_a)
      .def(
          "row",
          [](const BlockMask& mask, std::int64_t head, std::int64_t block) {
            check_index(mask, head, block);
            return copied(mask.row(head, block));
          },
          "head"_a, "block_row"_a, "Active key blocks of a block row.")
      .def(
          "column",
          [](const BlockMask& mask, std::int64_t head, std::int64_t block) {
            check_index(mask, head, block);
            return copied(mask.column(head, block));
          },
          "head"_a, "block_column"_a, "Block rows that see a key block.")
      .def("to_dense", &to_dense, nb::sig("def to_dense(self) -> numpy.typing.NDArray[numpy.bool_]"),
           "Booleans [heads, blocks, blocks].")
      .def("indices", &indices, nb::sig("def indices(self) -> numpy.typing.NDArray[numpy.int64]"),
           "(head, block row, block column) of every active block.")
      .def(nb::self | nb::self)
      .def(nb::self & nb::self)
      .def(nb::self - nb::self)
      .def(nb::self == nb::self, nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__hash__", &BlockMask::hash)
      .def("__str__", &BlockMask::to_string)
      .def("__repr__",
           [](const BlockMask& mask) {
             return fmt::format("BlockMask(block_size={}, heads={}, blocks={}, density={:.4f})", mask.block_size(),
                                mask.heads(), mask.blocks(), mask.density());
           })
      .def("__reduce__", [](const BlockMask& mask) {
        return nb::make_tuple(nb::type<BlockMask>(), nb::make_tuple(to_dense(mask), mask.block_size()));
      });
  bind_refusal(bound, "BlockMask");
}

void bind_block_pattern(nb::module_& module) {
  nb::class_<BlockPattern> bound(module, "BlockPattern",
                                 "A block-sparse pattern for any length: a union of terms. Immutable; unite with |.");
  bound.def(nb::init<BlockMask>(), "mask"_a)
      .def_static("local_window", &BlockPattern::local_window, "window"_a, "block_size"_a = kDefaultBlockSize)
      .def_static("strided", &BlockPattern::strided, "stride"_a, "block_size"_a = kDefaultBlockSize)
      .def_static("dilated_sparse", &BlockPattern::dilated_sparse, "rates"_a, "block_size"_a = kDefaultBlockSize)
      .def_static("global_local", &BlockPattern::global_local, "global_tokens"_a, "window"_a,
                  "block_size"_a = kDefaultBlockSize)
      .def_static("hierarchical", &BlockPattern::hierarchical, "levels"_a, "block_size"_a = kDefaultBlockSize)
      .def_static("random", &BlockPattern::random, "density"_a, "seed"_a = 0, "block_size"_a = kDefaultBlockSize)
      .def_static("adaptive", &BlockPattern::adaptive, "density"_a, "block_size"_a = kDefaultBlockSize)
      .def_static("bigbird", &BlockPattern::bigbird, "global_tokens"_a, "window"_a, "density"_a, "seed"_a,
                  "block_size"_a)
      .def_static("parse", &BlockPattern::parse, "text"_a)
      .def_prop_ro("block_size", &BlockPattern::block_size)
      .def("mask", &BlockPattern::mask, "rows"_a, "heads"_a = 1, "causal"_a = false, "The mask for a length.")
      .def(nb::self | nb::self)
      .def(nb::self == nb::self, nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__hash__", &BlockPattern::hash)
      .def("__str__", &BlockPattern::to_string)
      .def("__repr__",
           [](const BlockPattern& pattern) { return fmt::format("BlockPattern.parse('{}')", pattern.to_string()); })
      .def("__reduce__", [](const BlockPattern& pattern) {
        return nb::make_tuple(nb::module_::import_("longspan._patterns").attr("as_blocks"),
                              nb::make_tuple(pattern.to_string()));
      });
  bind_refusal(bound, "BlockPattern");
  nb::implicitly_convertible<BlockMask, BlockPattern>();
}

/// Views of a call that is only looked at.
struct Inspected {
  Inspected(nb::handle q_array, nb::handle k_array, nb::handle lengths, nb::handle key_mask, nb::handle alibi_slopes,
            const std::optional<Ranges>& query_ranges, std::uint64_t stream) {
    call.stream = reinterpret_cast<void*>(static_cast<std::uintptr_t>(stream));
    q = arrays.input(q_array, "q", Role::bnhd);
    k = arrays.input(k_array, "k", Role::bnhd);
    call.lengths = arrays.input(lengths, "lengths", Role::lengths);
    call.key_mask = arrays.input(key_mask, "key_mask", Role::key_mask);
    call.alibi_slopes = arrays.input(alibi_slopes, "alibi_slopes", Role::alibi_slopes);
    if (query_ranges) {
      for (const auto& [start, count] : *query_ranges) ranges.push_back({start, count});
      call.query_ranges = ranges;
    }
  }
  Arrays arrays;
  std::vector<RowRange> ranges;
  ConstTensorView q, k;
  Call call;
};

nb::tuple blocks_of(const Attention& attention, nb::handle q, nb::handle k, nb::object lengths, nb::object key_mask,
                    nb::object alibi_slopes, std::optional<Ranges> query_ranges, int block_size, std::uint64_t stream) {
  Inspected in(q, k, lengths, key_mask, alibi_slopes, query_ranges, stream);
  AttentionBlocks blocks;
  {
    nb::gil_scoped_release unlocked;
    blocks = attention_blocks(attention, in.q, in.k, in.call, block_size);
  }
  const std::size_t count = blocks.rows.size(), pairs = blocks.offsets.size() - 1;
  const auto size = static_cast<std::size_t>(blocks.block_size);
  std::vector<std::int64_t> places;  // (entry, head, block row, block column)
  const auto heads = static_cast<std::size_t>(in.q.heads());
  for (std::size_t pair = 0; pair < pairs; ++pair) {
    for (std::int64_t i = blocks.offsets[pair]; i < blocks.offsets[pair + 1]; ++i) {
      places.insert(places.end(),
                    {static_cast<std::int64_t>(pair / heads), static_cast<std::int64_t>(pair % heads),
                     blocks.rows[static_cast<std::size_t>(i)], blocks.columns[static_cast<std::size_t>(i)]});
    }
  }
  return nb::make_tuple(owned_array<std::int64_t>(std::move(places), {count, 4}),
                        owned_array<float>(std::move(blocks.values), {count, size, size}), blocks.block_size);
}

void received_by(const Attention& attention, nb::handle q, nb::handle k, nb::object lengths, nb::object key_mask,
                 nb::object alibi_slopes, std::optional<Ranges> query_ranges, nb::object received,
                 std::uint64_t stream) {
  Inspected in(q, k, lengths, key_mask, alibi_slopes, query_ranges, stream);
  const TensorView target = in.arrays.output(received, "received", Role::lse);
  nb::gil_scoped_release unlocked;
  attention_received(attention, in.q, in.k, target, in.call);
}

BlockMask chosen_by(const Attention& attention, nb::handle q, nb::handle k, nb::object lengths, nb::object key_mask,
                    nb::object alibi_slopes, std::optional<Ranges> query_ranges, std::uint64_t stream) {
  Inspected in(q, k, lengths, key_mask, alibi_slopes, query_ranges, stream);
  nb::gil_scoped_release unlocked;
  return adaptive_mask(attention, in.q, in.k, in.call);
}

}  // namespace

void bind_blocks(nb::module_& module) {
  bind_mask(module);
  bind_block_pattern(module);
}

void bind_inspection(nb::module_& module) {
  module.def("attention_blocks", &blocks_of, "attention"_a, "q"_a, "k"_a, "lengths"_a = nb::none(),
             "key_mask"_a = nb::none(), "alibi_slopes"_a = nb::none(), "query_ranges"_a = nb::none(),
             "block_size"_a = 0, "stream"_a = 0,
             "(entry, head, block row, block column) of each block, its probabilities, the block size.");
  module.def("attention_received", &received_by, "attention"_a, "q"_a, "k"_a, "lengths"_a = nb::none(),
             "key_mask"_a = nb::none(), "alibi_slopes"_a = nb::none(), "query_ranges"_a = nb::none(),
             "received"_a = nb::none(), "stream"_a = 0,
             "The total weight every key receives, into float32 [batch, heads, tokens].");
  module.def("adaptive_mask", &chosen_by, "attention"_a, "q"_a, "k"_a, "lengths"_a = nb::none(),
             "key_mask"_a = nb::none(), "alibi_slopes"_a = nb::none(), "query_ranges"_a = nb::none(), "stream"_a = 0,
             "What an adaptive pattern chooses.");
  module.def(
      "draw",
      [](const Plan& plan, std::int64_t head, std::int64_t cells, bool ascii) {
        return picture(plan, head, cells).to_text(ascii);
      },
      "plan"_a, "head"_a = 0, "cells"_a = 48, "ascii"_a = false);
  module.def(
      "draw_svg",
      [](const Plan& plan, std::int64_t head, std::int64_t cells) {
        return picture(plan, head, cells).to_svg(plan.pattern().to_string());
      },
      "plan"_a, "head"_a = 0, "cells"_a = 128);
}

}  // namespace longspan::python
