// longspan ring: a sequence split over ranks of this process, or over the ranks of mpirun.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <optional>

#include "command.h"
#include "console.h"
#include "files/names.h"
#include "files/output.h"
#include "interrupt.h"
#include "longspan/error.h"
#include "machine.h"
#include "ring/rank_run.h"
#include "ring/ranks.h"
#include "text.h"
#include "units.h"

namespace longspan::cli {
namespace {

constexpr std::int64_t kDefaultTokens = 131072;

struct RingCommand {
  ProblemOptions problem;
  int ranks = 0;
  bool ranks_given = false;
  std::string shards = "even", q, k, v, out, trace, halo_limit = "0", link, latency = "0";
  double deadline = 60;
  int repeat = 1;
  bool backward = false, verify = false, json = false;
};

RingInputs read_inputs(const RingCommand& command, const ProblemChoice& choice) {
  RingInputs inputs;
  inputs.seed = choice.seed;
  inputs.layout = choice.layout;
  inputs.problem = choice.problem(kDefaultTokens);
  const std::string* const names[] = {&command.q, &command.k, &command.v};
  const auto given =
      std::count_if(std::begin(names), std::end(names), [](const std::string* name) { return !name->empty(); });
  if (given == 0) return inputs;
  if (given != 3) throw InvalidArgument("q", "give --q, --k and --v together, or none of them for random numbers");
  for (std::size_t i = 0; i < 3; ++i) {
    inputs.files[i] =
        read_array(*names[i], {.uint16_is_bf16 = command.problem.given("dtype") && choice.dtype == DType::bf16});
    const std::size_t rank = inputs.files[i]->header.shape.size();
    if (rank != 3 && rank != 4) {
      throw InvalidArgument(
          std::string(1, "qkv"[i]),
          fmt::format("'{}' has {} dimensions: give [batch, rows, heads, head_dim]", *names[i], rank));
    }
  }
  const ConstTensorView q = inputs.file(0), k = inputs.file(1), v = inputs.file(2);
  if (k.sizes != v.sizes || q.rows() != k.rows() || q.batch() != k.batch() || q.columns() != k.columns() ||
      q.dtype != k.dtype || k.dtype != v.dtype) {
    throw InvalidArgument(
        "k", fmt::format("q [{}], k [{}] and v [{}]: all must have the same type, batch, rows and head_dim",
                         fmt::join(q.sizes, ", "), fmt::join(k.sizes, ", "), fmt::join(v.sizes, ", ")));
  }
  inputs.problem = Attention::problem(q, k);
  inputs.problem.device = choice.device;
  return inputs;
}

void write_trace(OutputFile& file, const std::vector<Json>& ranks) {
  Json events = Json::array();
  double first = ranks[0]["began"];  // one clock for all ranks
  for (const Json& rank : ranks) first = std::min(first, rank["began"].get<double>());
  for (const Json& rank : ranks) {
    const int number = rank["rank"];
    events.push_back({{"name", "thread_name"},
                      {"ph", "M"},
                      {"pid", 0},
                      {"tid", number},
                      {"args", {{"name", fmt::format("rank {}", number)}}}});
    const auto add = [&](const Json& pass, const char* label) {
      const double offset = pass["began"].get<double>() - first;
      for (const Json& event : pass["events"]) {
        const double begin = event["begin"], end = event["end"];
        events.push_back({{"name", fmt::format("{}: {}", label, event["name"].get<std::string>())},
                          {"ph", "X"},
                          {"pid", 0},
                          {"tid", number},
                          {"ts", (offset + begin) * 1e6},
                          {"dur", (end - begin) * 1e6}});
      }
    };
    add(rank, "forward");
    if (rank.contains("backward")) add(rank["backward"], "backward");
  }
  file.write(Json{{"displayTimeUnit", "ms"}, {"traceEvents", events}}.dump() + "\n");
}

void print_ranks(const std::vector<Json>& ranks, const char* label, const char* pass) {
  Table table({{label, Align::left},
               {"rows"},
               {"kernel", Align::left},
               {"received"},
               {"sent"},
               {"messages"},
               {"waited"},
               {"overlapped"},
               {"total"},
               {"tensors"},
               {"remote rows"}});
  for (const Json& rank : ranks) {
    const Json& of = *pass ? rank[pass] : rank;
    const auto bytes = [&](const char* key) { return short_bytes(of[key].get<double>()); };
    const auto duration = [&](const char* key) { return short_duration(of[key].get<double>()); };
    table.add({fmt::format("{}", rank["rank"].get<int>()), with_commas(rank["rows"].get<double>()),
               of["kernel"].get<std::string>(), bytes("bytes_received"), bytes("bytes_sent"),
               fmt::format("{}", of["messages_received"].get<std::int64_t>()), duration("waited_seconds"),
               duration("overlapped_seconds"), duration("seconds"), short_bytes(rank["tensor_bytes"].get<double>()),
               bytes("halo_bytes")});
  }
  print_text(table.to_string());
}

/// What all ranks did, and numbers of the comparison if there was one.
struct Verdict {
  bool bits = true, ok = true;
  double over_tolerance = 0;
  std::string kernel;              // that ran
  std::vector<std::string> wrong;  // for people, one line each
};

Verdict verdict_of(const std::vector<Json>& ranks, bool verified) {
  Verdict verdict;
  for (const Json& rank : ranks) {
    if (verdict.kernel.empty()) verdict.kernel = rank["kernel"];  // a rank without rows runs none
    if (!verified) continue;
    const bool ok = rank["verified"];
    verdict.bits = verdict.bits && rank["bit_identical"].get<bool>();
    verdict.ok = verdict.ok && ok;
    for (const Json& check : rank["checks"]) {
      const double over = check["over_tolerance"];
      verdict.over_tolerance = std::max(verdict.over_tolerance, over);
      const std::string worst = check["worst"];
      if (ok || worst.empty() || (over <= 1 && rank["rounds"] > 0)) continue;
      verdict.wrong.push_back(fmt::format("rank {}: {}", rank["rank"].get<int>(), worst));
    }
  }
  return verdict;
}

void print_verdict(const Verdict& verdict) {
  const std::string part = fmt::format("at most {:.2g}% of what rounding may cause", 100 * verdict.over_tolerance);
  if (!verdict.ok) {
    print("{}\n", bad("NOT verified: results differ from one device"));
    for (const std::string& line : verdict.wrong) print("  {}\n", line);
  } else if (!verdict.bits) {
    print("{}\n", good(fmt::format("verified: equal to one device up to rounding (rounds): {}", part)));
  } else {
    print("{}\n", good(fmt::format("verified: out and lse have the bits of one device{}{}",
                                   verdict.kernel.empty() ? ", which computes nothing" : " with " + verdict.kernel,
                                   verdict.over_tolerance > 0 ? "; gradients differ by " + part : "")));
  }
}

Json describe_run(const RingInputs& inputs, const RingSettings& settings, const char* engine, bool as_planned,
                  const Verdict& verdict, const std::vector<Json>& ranks) {
  double slowest = 0;
  for (const Json& rank : ranks) slowest = std::max(slowest, rank["seconds"].get<double>());
  Json json = {{"engine", engine},
               {"ranks", settings.shards.ranks()},
               {"pattern", settings.pattern.to_string()},
               {"problem", describe(inputs.problem)},
               {"options", describe(settings.options)},
               {"kernel", verdict.kernel},
               {"bytes_as_planned", as_planned},
               {"seconds", slowest}};
  if (settings.verify) {
    json["bit_identical"] = verdict.bits;
    json["over_tolerance"] = verdict.over_tolerance;
    json["verified"] = verdict.ok && as_planned;
  }
  json["per_rank"] = ranks;
  return json;
}

/// What rank 0 says for all.
int report(const RingCommand& command, const RingInputs& inputs, const RingSettings& settings, const char* engine,
           std::vector<Json> ranks) {
  const Verdict verdict = verdict_of(ranks, settings.verify);
  bool as_planned = true;
  for (Json& rank : ranks) {
    as_planned = as_planned && rank["bytes_received"] == rank["planned_bytes_received"] &&
                 rank["bytes_sent"] == rank["planned_bytes_sent"];
    rank.erase("events");
    if (rank.contains("backward")) rank["backward"].erase("events");
  }
  if (command.json) {
    print_json(describe_run(inputs, settings, engine, as_planned, verdict, ranks));
  } else {
    print("{}{}\n{} tokens over {} {} ranks, batch {}, {} heads of {} ({} for keys and values), {}\n\n",
          bold(settings.pattern.to_string()), settings.options.causal ? ", causal" : "",
          with_commas(inputs.problem.tokens), settings.shards.ranks(), engine, inputs.problem.batch,
          inputs.problem.heads, inputs.problem.head_dim, inputs.problem.kv_heads, name_of(inputs.problem.dtype));
    print_ranks(ranks, "forward", "");
    if (settings.backward) {
      print("\n");
      print_ranks(ranks, "backward", "backward");
    }
    print("\nbytes moved {} the plan\n", as_planned ? "equal" : bad("DIFFER from"));
    if (settings.verify) print_verdict(verdict);
    if (!command.out.empty()) print("out: {}\n", printable(command.out));
  }
  return verdict.ok && as_planned ? kSuccess : kOverTolerance;
}

void check_names(const RingCommand& command) {
  const NamedFile out = array_file("out", command.out), trace = text_file("trace", command.trace);
  check_ending(out, {".npy"});
  check_ending(trace, {".json"});
  if (!command.out.empty() && (is_special(command.out) || is_standard_output(command.out))) {
    throw InvalidArgument(
        "out",
        fmt::format("--out '{}': ranks write together to .npy files only, not to pipes or devices", command.out));
  }
  check_outputs({out, trace},
                {array_file("q", command.q), array_file("k", command.k), array_file("v", command.v),
                 array_file("mask", command.problem.mask_file())},
                command.json);
}

/// Processes that a launcher (mpirun, srun) started together with this one, as it tells them; 0: there is none, or it
/// does not say.
int launched_processes() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"}) {
    const char* const value = std::getenv(name);
    const int count = value ? std::atoi(value) : 0;
    if (count > 0) return count;
  }
  return 0;
}

/// This process's end of the ring of all processes; null with --ranks, whose ranks are threads.
std::shared_ptr<Communicator> join_processes(const RingCommand& command) {
  const int launched = launched_processes();
  if (command.ranks_given) {
    if (command.ranks < 1) throw InvalidArgument("ranks", fmt::format("--ranks is {}: give at least 1", command.ranks));
    if (launched > 1) {
      throw InvalidArgument(
          "ranks",
          fmt::format("--ranks {} in each of {} processes that mpirun or srun started would be {} rings: leave "
                      "--ranks out for one ring of {} processes, or start longspan without mpirun",
                      command.ranks, launched, launched, launched));
    }
    return nullptr;
  }
  if (launched == 0 && !under_mpi() && !std::getenv("PMIX_RANK")) {
    throw InvalidArgument("ranks",
                          "no ranks: give --ranks 4 for ranks of this process, or start the command with mpirun -n 4");
  }
  std::shared_ptr<Communicator> mpi = mpi_ring();  // says so if the build has no MPI
  if (launched > 1 && mpi->size() != launched) {
    throw Unsupported(
        fmt::format("{} processes were started, but MPI knows of {}: start them with the mpirun of the "
                    "MPI that longspan was built with (or srun --mpi=pmix)",
                    launched, mpi->size()));
  }
  return mpi;
}

RingSettings settings_of(const RingCommand& command, const ProblemChoice& choice, const RingInputs& inputs, int ranks) {
  RingSettings settings;
  settings.pattern = choice.pattern;
  settings.options = choice.options;
  settings.backward = command.backward;
  settings.verify = command.verify;
  if (command.repeat < 1)
    throw InvalidArgument("repeat", fmt::format("--repeat is {}: give at least 1", command.repeat));
  settings.repeat = command.repeat;
  if (!(command.deadline > 0 && command.deadline < 1e6))
    throw InvalidArgument("deadline", fmt::format("--deadline is {}: give seconds above 0", command.deadline));
  settings.ring.deadline = std::chrono::milliseconds(static_cast<std::int64_t>(command.deadline * 1000));
  const std::int64_t halo_limit = parse_size("halo-limit", command.halo_limit);
  if (halo_limit < 0)
    throw InvalidArgument("halo-limit", fmt::format("--halo-limit is {}: give bytes, or 0 for no limit", halo_limit));
  settings.ring.halo_limit_bytes = static_cast<std::size_t>(halo_limit);
  if (command.shards == "even") settings.shards = Shards::even(inputs.problem.tokens, ranks);
  else if (command.shards == "zigzag") settings.shards = Shards::zigzag(inputs.problem.tokens, ranks);
  else throw InvalidArgument("shards", fmt::format("--shards is '{}': give even or zigzag", command.shards));
  settings.out = command.out;
  const Problem& p = inputs.problem;
  settings.out_shape = inputs.files[0]                 ? inputs.files[0]->header.shape
                       : inputs.layout == Layout::bnhd ? std::vector{p.batch, p.tokens, p.heads, p.head_dim}
                                                       : std::vector{p.batch, p.heads, p.tokens, p.head_dim};
  return settings;
}

/// The network that ranks of this process imitate.
LocalLink link_of(const RingCommand& command) {
  LocalLink link;
  if (!command.link.empty()) link.bytes_per_second = parse_rate("link", command.link);
  link.latency = std::chrono::nanoseconds(std::llround(parse_duration("latency", command.latency) * 1e9));
  if (!command.ranks_given && (!command.link.empty() || link.latency.count() > 0))
    throw InvalidArgument("link", "--link and --latency imitate a network between ranks of one process: give --ranks");
  return link;
}

/// As all ranks of this process, or as the one that `mpi` is.
int run_ring(const RingCommand& command, const ProblemChoice& choice, const std::shared_ptr<Communicator>& mpi) {
  const int count = mpi ? mpi->size() : command.ranks;
  const LocalLink link = link_of(command);
  const RingInputs inputs = read_inputs(command, choice);
  const RingSettings settings = settings_of(command, choice, inputs, count);
  std::optional<OutputFile> trace;
  if (!command.trace.empty() && (!mpi || mpi->rank() == 0)) trace.emplace(command.trace);

  OneDevice whole(inputs, settings);
  std::vector<Json> ranks;
  const auto as_rank = [&](const std::shared_ptr<Communicator>& communicator) {
    const Json mine = run_rank(inputs, settings, communicator, whole);
    if (!communicator) {
      ranks = {mine};
      return;
    }
    const std::vector<std::string> texts = gather(*communicator, mine.dump(), settings.ring.deadline);
    if (communicator->rank() == 0) {
      for (const std::string& text : texts) ranks.push_back(Json::parse(text));
    }
  };
  if (count == 1) as_rank(nullptr);
  else if (mpi) as_rank(mpi);
  else run_local_ranks(count, as_rank, link);
  if (ranks.empty()) return kSuccess;  // rank 0 speaks
  if (trace) {
    write_trace(*trace, ranks);
    trace->commit();
  }
  return report(command, inputs, settings, mpi ? "mpi" : "local", std::move(ranks));
}

int run(const RingCommand& command) {
  check_names(command);
  ProblemChoice choice = command.problem.resolve();
  // Over somebody's arrays the ring computes what attend computes; over random numbers, what the demo shows.
  if (!command.q.empty() && !command.problem.pattern_given()) choice.pattern = Pattern::dense();
  const std::shared_ptr<Communicator> mpi = join_processes(command);
  try {
    return run_ring(command, choice, mpi);
  } catch (const std::exception& error) {
    // The process then ends without finalising MPI, so that the launcher stops the ranks that wait for this one.
    if (mpi) {
      mpi->abort();
      mpi->fail(error.what());
    }
    throw;
  }
}

}  // namespace

Command add_ring(CLI::App& app) {
  CLI::App* parser =
      app.add_subcommand("ring", "Split a sequence over ranks that exchange only the rows the pattern needs");
  parser->footer(
      "\nWith --ranks the ranks are threads of this process; without it the command is one rank of mpirun. Each rank "
      "reads and\n"
      "writes its own rows only. Bytes moved are counted and compared with the plan; --verify compares the result with "
      "one\n"
      "device (which then holds the whole sequence) and exits with 1 if they differ. With --q, --k and --v and without "
      "a\n"
      "pattern attention is dense, as in attend.\n"
      "Example: longspan ring --ranks 4 --tokens 128K --segments 2K,32K,128K --dilations 1,16,64 --verify\n"
      "         mpirun -n 4 longspan ring --tokens 1M --segments 2K,1M --dilations 1,512 --json");
  const auto command = std::make_shared<RingCommand>();
  parser->add_option("--ranks", command->ranks, "Ranks of this process, one thread each")->type_name("COUNT");
  parser->add_option("--shards", command->shards, "even: contiguous; zigzag: two chunks each, balanced for causal work")
      ->type_name("even|zigzag");
  parser->add_flag("--backward", command->backward, "Gradients too");
  parser->add_flag("--verify", command->verify, "Compare with one device");
  parser->add_option("--deadline", command->deadline, "Longest wait for a rank in one exchange (default 60)")
      ->type_name("SECONDS");
  parser->add_option("--halo-limit", command->halo_limit, "Most bytes of remote rows at a time; beyond it, rounds")
      ->type_name("BYTES");
  parser->add_option("--link", command->link, "With --ranks: imitate a network of this rate, each rank in and out")
      ->type_name("RATE");
  parser->add_option("--latency", command->latency, "With --ranks: imitate this latency of every message")
      ->type_name("TIME");
  parser->add_option("--repeat,--repeats", command->repeat, "Runs; times are medians")->type_name("COUNT");
  const auto file = [&](const char* name, std::string& target, const char* meaning) {
    add_file_option(*parser, name, target, meaning)->group("Files");
  };
  file("--q", command->q, "Queries (default: random numbers by --seed)");
  file("--k", command->k, "Keys");
  file("--v", command->v, "Values");
  file("--out", command->out, "Result, an .npy file");
  file("--trace", command->trace, "What each rank did when, for ui.perfetto.dev");
  command->problem.add_to(*parser);
  parser->add_flag("--json", command->json, "Machine-readable output");
  return {parser, [command, parser] {
            command->ranks_given = parser->count("--ranks") > 0;
            return run(*command);
          }};
}

}  // namespace longspan::cli
