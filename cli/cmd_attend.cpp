// longspan attend: attention over arrays in files.
#include <CLI/CLI.hpp>
#include <memory>

#include "command.h"
#include "console.h"
#include "files/names.h"
#include "files/output.h"
#include "gpu/gpu.h"
#include "interrupt.h"
#include "json.h"
#include "longspan/error.h"
#include "machine.h"
#include "problem_options.h"
#include "tensor.h"
#include "text.h"

namespace longspan::cli {
namespace {

struct AttendCommand {
  ProblemOptions problem;
  std::string q, k, v, out, lse, lengths, key_mask, alibi, query_ranges;
  bool json = false;
};

/// An input with the view that the operator takes: of the file's memory, or of a copy on a GPU.
struct Input {
  Array array;
  Tensor copy;
  ConstTensorView view;

  void place(std::string_view name, Device device) {
    if (device.type == DeviceType::cpu || !view.given()) return;
    copy = Tensor::copy_of(name, view, device);
    view = copy.view();
  }
};

std::string shape_text(const Array& array) { return fmt::format("[{}]", fmt::join(array.header.shape, ", ")); }

/// [B, N, H, D] or [B, H, N, D]; without the batch where the file has three dimensions.
Input read_rows(const std::string& option, const std::string& location, const AttendCommand& command,
                const ProblemChoice& choice) {
  const bool dtype_given = command.problem.given("dtype");
  Input input;
  input.array = read_array(location, {.uint16_is_bf16 = dtype_given && choice.dtype == DType::bf16});
  std::vector<std::int64_t> shape = input.array.header.shape;
  if (shape.size() == 3) shape.insert(shape.begin(), 1);
  if (shape.size() != 4) {
    throw InvalidArgument(
        option, fmt::format("--{} has shape {}: give [batch, rows, heads, head_dim] (--layout bnhd) or [batch, "
                            "heads, rows, head_dim] (--layout bhnd)",
                            option, shape_text(input.array)));
  }
  const DType dtype = input.array.header.dtype;
  if (dtype_given && dtype != choice.dtype) {
    throw InvalidArgument("dtype",
                          fmt::format("--dtype is {} and --{} holds {}: leave --dtype out, or convert the file",
                                      name_of(choice.dtype), option, name_of(dtype)));
  }
  const bool bnhd = choice.layout == Layout::bnhd;
  input.view = view_of<const void>(input.array.data, dtype, choice.layout, shape[0], shape[bnhd ? 1 : 2],
                                   shape[bnhd ? 2 : 1], shape[3]);
  return input;
}

/// An array of `rank` dimensions for an optional argument of the call.
Array read_extra(const std::string& option, const std::string& location, std::size_t rank,
                 std::initializer_list<DType> dtypes) {
  Array array = read_array(location);
  if (array.header.shape.size() != rank) {
    throw InvalidArgument(option, fmt::format("--{} has shape {}: give {} dimension{}", option, shape_text(array), rank,
                                              rank == 1 ? "" : "s"));
  }
  std::string names;
  for (const DType dtype : dtypes) {
    if (dtype == array.header.dtype) return array;
    names += (names.empty() ? "" : " or ") + std::string(name_of(dtype));
  }
  throw InvalidArgument(option, fmt::format("--{} holds {}: give {}", option, name_of(array.header.dtype), names));
}

/// start:count,start:count
std::vector<RowRange> parse_ranges(std::string_view text) {
  std::vector<RowRange> ranges;
  while (!text.empty()) {
    const std::size_t comma = text.find(',');
    const std::string_view range = text.substr(0, comma);
    const std::size_t colon = range.find(':');
    if (colon == std::string_view::npos) {
      throw InvalidArgument("query_ranges",
                            fmt::format("--query-ranges has '{}': give start:count, for example 0:16,4096:16", range));
    }
    ranges.push_back(
        {parse_size("query-ranges", range.substr(0, colon)), parse_size("query-ranges", range.substr(colon + 1))});
    text = comma == std::string_view::npos ? std::string_view{} : text.substr(comma + 1);
  }
  return ranges;
}

/// Shape options are facts about the files here: where given, they must agree.
void check_shape_options(const AttendCommand& command, const ProblemChoice& choice, const Input& q, const Input& k) {
  const auto check = [&](const char* option, std::int64_t given, std::int64_t found, const char* where) {
    if (command.problem.given(option) && given != found) {
      throw InvalidArgument(option, fmt::format("--{} is {} and {} has {}: leave the option out, the files say it",
                                                option, given, where, found));
    }
  };
  check("tokens", choice.tokens.value_or(0), k.view.rows(), "k");
  check("batch", choice.batch, q.view.batch(), "q");
  check("heads", choice.heads, q.view.heads(), "q");
  check("kv-heads", choice.kv_heads, k.view.heads(), "k");
  check("head-dim", choice.head_dim, q.view.columns(), "q");
}

/// Everything about the files' names that could go wrong, before any of them is opened.
void check_names(const AttendCommand& command) {
  const std::vector<NamedFile> outputs = {array_file("out", command.out), array_file("lse", command.lse)};
  for (const NamedFile& output : outputs) check_ending(output, {".npy", ".safetensors"});
  check_outputs(outputs,
                {array_file("q", command.q), array_file("k", command.k), array_file("v", command.v),
                 array_file("lengths", command.lengths), array_file("key-mask", command.key_mask),
                 array_file("alibi-slopes", command.alibi), array_file("mask", command.problem.mask_file())},
                command.json);
}

/// What the files hold, where the operator wants it. Not copied: the call points into it.
struct Inputs {
  Input q, k, v, key_mask, alibi;
  Array lengths;  // stays on the host, where its values are checked
  std::vector<RowRange> ranges;
  Call call;

  Inputs(const AttendCommand& command, const ProblemChoice& choice)
      : q(read_rows("q", command.q, command, choice)),
        k(read_rows("k", command.k, command, choice)),
        v(read_rows("v", command.v, command, choice)),
        ranges(parse_ranges(command.query_ranges)) {
    check_shape_options(command, choice, q, k);
    if (!command.lengths.empty()) {
      lengths = read_extra("lengths", command.lengths, 1, {DType::i32, DType::i64});
      call.lengths = ConstTensorView::per_batch(lengths.data, lengths.header.dtype, lengths.header.shape[0]);
    }
    if (!command.key_mask.empty()) {
      key_mask.array = read_extra("key-mask", command.key_mask, 2, {DType::boolean});
      const auto& shape = key_mask.array.header.shape;
      key_mask.view = ConstTensorView::mask(key_mask.array.data, shape[0], shape[1]);
    }
    if (!command.alibi.empty()) {
      alibi.array = read_extra("alibi-slopes", command.alibi, 1, {DType::f32});
      alibi.view = ConstTensorView::per_head(alibi.array.data, alibi.array.header.shape[0]);
    }
    q.place("q", choice.device);
    k.place("k", choice.device);
    v.place("v", choice.device);
    key_mask.place("key-mask", choice.device);
    alibi.place("alibi-slopes", choice.device);
    call.cancel = &interrupted();
    call.dropout_seed = choice.seed;
    call.query_ranges = ranges;
    call.key_mask = key_mask.view;
    call.alibi_slopes = alibi.view;
  }
  Inputs(const Inputs&) = delete;
  Inputs& operator=(const Inputs&) = delete;
};

/// Where results are made, and the host's memory that they are written from: the same on a CPU. lse may be absent.
struct Results {
  Tensor host_out, host_lse, gpu_out, gpu_lse;

  Results(const ConstTensorView& q, const ProblemChoice& choice, bool with_lse) {
    const auto make = [&](Tensor& out, Tensor& lse, Device device) {
      out = Tensor("out", q.dtype, choice.layout, q.batch(), q.rows(), q.heads(), q.columns(), device);
      const DType dtype = q.dtype == DType::f64 ? DType::f64 : DType::f32;
      if (with_lse) lse = Tensor::lse("lse", q.batch(), q.rows(), q.heads(), dtype, device);
    };
    make(host_out, host_lse, {});
    if (choice.device.type == DeviceType::cuda) make(gpu_out, gpu_lse, choice.device);
  }
  const TensorView& out() const { return gpu_out.view().given() ? gpu_out.view() : host_out.view(); }
  const TensorView& lse() const { return gpu_lse.view().given() ? gpu_lse.view() : host_lse.view(); }
  void bring_home() const {
    if (gpu_out.view().given()) host_out.copy_from(gpu_out);
    if (gpu_lse.view().given()) host_lse.copy_from(gpu_lse);
  }
};

/// Opens the output files and sets their space aside.
void announce(ArrayWriter& writer, const AttendCommand& command, const Inputs& inputs, const Results& results) {
  const std::vector<std::int64_t>& shape = inputs.q.array.header.shape;
  writer.add(command.out, results.host_out.view().dtype, shape, results.host_out.data());
  if (!command.lse.empty()) {
    const ConstTensorView& q = inputs.q.view;
    std::vector<std::int64_t> lse_shape = {q.batch(), q.heads(), q.rows()};
    if (shape.size() == 3) lse_shape.erase(lse_shape.begin());
    writer.add(command.lse, results.host_lse.view().dtype, lse_shape, results.host_lse.data());
  }
  writer.reserve();
}

int run(const AttendCommand& command) {
  check_names(command);
  const ProblemChoice choice = command.problem.resolve();
  require_device(choice.device);
  Inputs inputs(command, choice);
  const ConstTensorView &q = inputs.q.view, &k = inputs.k.view, &v = inputs.v.view;
  const Results results(q, choice, !command.lse.empty());
  ArrayWriter writer;
  announce(writer, command, inputs, results);

  const Attention attention(choice.pattern, choice.options);
  double seconds = 0;
  CallReport ran;
  {
    Progress progress("attend");
    Call call = inputs.call;
    call.report = &ran;
    call.progress = [&](double fraction) {
      progress.update(fraction);
      return true;
    };
    seconds = seconds_on(choice.device, [&] { attention.forward(q, k, v, results.out(), results.lse(), call); });
  }
  results.bring_home();
  writer.commit();

  if (command.json) {
    Json json = {{"out", command.out},
                 {"shape", inputs.q.array.header.shape},
                 {"dtype", name_of(q.dtype)},
                 {"kernel", ran.kernel},
                 {"pattern", choice.pattern.to_string()},
                 {"seconds", seconds},
                 {"device", to_string(choice.device)}};
    if (!command.lse.empty()) json["lse"] = command.lse;
    print_json(json);
  } else {
    print("{}: {} {} in {} with {}\n", printable(command.out), name_of(q.dtype), shape_text(inputs.q.array),
          short_duration(seconds), ran.kernel.empty() ? "nothing to compute" : fmt::format("kernel {}", ran.kernel));
  }
  return kSuccess;
}

}  // namespace

Command add_attend(CLI::App& app) {
  CLI::App* parser = app.add_subcommand("attend", "Attention over arrays in .npy or .safetensors files");
  parser->footer(
      "\nArrays are [batch, rows, heads, head_dim] (or [batch, heads, rows, head_dim] with --layout bhnd); the batch "
      "may be left\n"
      "out. Files are `file.npy` or `file.safetensors#name`; inputs are memory-mapped, an output replaces an existing "
      "file only\n"
      "when complete; `--out -` writes .npy to standard output. Without a pattern attention is dense.\n"
      "bfloat16 in .npy: ml_dtypes' two-byte void, or uint16 with --dtype bf16.\n"
      "Examples: longspan attend --q q.npy --k k.npy --v v.npy --out out.npy --lse lse.npy --causal\n"
      "          longspan attend --q q.npy --k k.npy --v v.npy --out out.npy --segments 2048,4096 --dilations 1,2");
  const auto command = std::make_shared<AttendCommand>();
  const auto file = [&](const char* name, std::string& target, const char* meaning) {
    return add_file_option(*parser, name, target, meaning)->group("Files");
  };
  file("--q", command->q, "Queries")->required();
  file("--k", command->k, "Keys")->required();
  file("--v", command->v, "Values")->required();
  file("--out", command->out, "Result, in q's shape and type")->required();
  file("--lse", command->lse, "Log of the softmax denominators, float32 [batch, heads, rows]");
  file("--lengths", command->lengths, "Rows of each batch entry, int32 or int64 [batch]");
  file("--key-mask", command->key_mask, "Which keys may be attended, bool [batch, rows]");
  file("--alibi-slopes", command->alibi, "Slope of each head, float32 [heads]");
  parser->add_option("--query-ranges", command->query_ranges, "Positions of q's rows (default: all of them)")
      ->group("Files")
      ->type_name("START:COUNT,...");
  command->problem.add_to(*parser, DefaultPattern::dense);
  parser->add_flag("--json", command->json, "Machine-readable output");
  return {parser, [command] { return run(*command); }};
}

}  // namespace longspan::cli
