// longspan info: the machine, the kernels of this build, and which of them would run a problem (--why: why not).
#include <CLI/CLI.hpp>
#include <memory>

#include "command.h"
#include "console.h"
#include "gpu/gpu.h"
#include "json.h"
#include "longspan/error.h"
#include "longspan/machine.h"
#include "longspan/memory.h"
#include "longspan/threads.h"
#include "longspan/version.h"
#include "machine.h"
#include "problem_options.h"

namespace longspan::cli {
namespace {

constexpr std::int64_t kDefaultTokens = 131072;

struct InfoCommand {
  ProblemOptions problem;
  bool why = false;
  bool json = false;
};

Json describe_kernels(const Plan& plan) {
  Json kernels = Json::array();
  const auto forward = plan.kernel_verdicts(Pass::forward), backward = plan.kernel_verdicts(Pass::backward);
  const auto describe = [](const KernelVerdict& verdict) {
    return Json{{"ok", verdict.can_run}, {"reason", verdict.reason}};
  };
  for (std::size_t i = 0; i < forward.size(); ++i) {
    kernels.push_back(
        {{"name", forward[i].kernel}, {"forward", describe(forward[i])}, {"backward", describe(backward[i])}});
  }
  return kernels;
}

Json describe_pools() {
  const PlanCacheStatistics plans = plan_cache::statistics();
  const MemoryStatistics memory = host_memory::statistics();
  return {{"plan_cache",
           {{"hits", plans.hits},
            {"misses", plans.misses},
            {"evictions", plans.evictions},
            {"entries", plans.entries},
            {"bytes", plans.bytes},
            {"limit_bytes", plans.limit_bytes}}},
          {"host_memory",
           {{"allocations", memory.allocations},
            {"reserved_bytes", memory.reserved_bytes},
            {"used_bytes", memory.used_bytes},
            {"peak_used_bytes", memory.peak_used_bytes},
            {"limit_bytes", memory.limit_bytes}}}};
}

Json describe_gpus() {
  Json list = Json::array();
  for (const GpuFacts& facts : gpus()) {
    list.push_back({{"device", to_string(Device{DeviceType::cuda, static_cast<int>(list.size())})},
                    {"name", facts.name},
                    {"compute_capability", fmt::format("{}.{}", facts.compute / 10, facts.compute % 10)},
                    {"multiprocessors", facts.multiprocessors},
                    {"memory_bytes", facts.memory_bytes}});
  }
  return list;
}

int run(const InfoCommand& command) {
  const ProblemChoice choice = command.problem.resolve();
  const auto plan = Attention(choice.pattern, choice.options).plan(choice.problem(kDefaultTokens));
  const auto chosen = [&](Pass pass) { return std::string(plan->kernel_name(pass)); };
  if (!choice.options.kernel.empty() && chosen(Pass::forward).empty() && chosen(Pass::backward).empty()) {
    throw Unsupported(why_no_kernel(*plan, Pass::forward));
  }
  const Json kernels = describe_kernels(*plan);
  const Json pools = describe_pools();

  if (command.json) {
    Json json = {
        {"version", version()},
        {"commit", commit()},
        {"machine",
         {{"cpu", cpu().model},
          {"cpus", cpu().usable},
          {"memory_bytes", memory_bytes()},
          {"cache_bytes", {{"l1", cpu().cache_bytes[0]}, {"l2", cpu().cache_bytes[1]}, {"l3", cpu().cache_bytes[2]}}},
          {"instruction_sets", instruction_sets()}}},
        {"threads", num_threads()},
        {"gpus", describe_gpus()},
        {"gpu_driver", gpu_driver()},
        {"why_no_gpu", why_no_gpu()},
        {"problem", describe(plan->problem())},
        {"pattern", choice.pattern.to_string()},
        {"chosen", {{"forward", chosen(Pass::forward)}, {"backward", chosen(Pass::backward)}}},
        {"kernels", kernels}};
    json.update(pools);
    print_json(json);
    return kSuccess;
  }

  const auto cache = [](std::size_t level) { return short_bytes(static_cast<double>(cpu().cache_bytes[level - 1])); };
  print("{} {} ({})\n", bold("longspan"), version(), commit());
  print("machine       {}\n", machine_summary());
  print("caches        L1 {}, L2 {}, L3 {}\n", cache(1), cache(2), cache(3));
  print_text(fmt::format("instructions  {}\n", fmt::join(instruction_sets(), " ")));
  print("threads       {}\n", num_threads());
  if (gpus().empty()) {
    print("GPUs          none: {}\n", why_no_gpu());
  } else {
    for (int index = 0; index < static_cast<int>(gpus().size()); ++index) {
      const Device device{DeviceType::cuda, index};
      print("{:<14}{}\n", to_string(device), device_summary(device));
    }
    print("driver        {}\n", gpu_driver());
  }
  const auto& plans = pools["plan_cache"];
  const auto& memory = pools["host_memory"];
  print("plan cache    {} entries, {} of {}, {} hits, {} misses, {} evictions\n", plans["entries"].get<int>(),
        short_bytes(plans["bytes"].get<double>()), short_bytes(plans["limit_bytes"].get<double>()),
        plans["hits"].get<int>(), plans["misses"].get<int>(), plans["evictions"].get<int>());
  print("memory pool   {} reserved, {} used, {} at the peak\n\n", short_bytes(memory["reserved_bytes"].get<double>()),
        short_bytes(memory["used_bytes"].get<double>()), short_bytes(memory["peak_used_bytes"].get<double>()));
  print("{}, {} tokens, {} heads of {}, {} on {}\n", choice.pattern.to_string(),
        with_commas(static_cast<double>(plan->problem().tokens)), choice.heads, choice.head_dim, name_of(choice.dtype),
        to_string(choice.device));

  Table table({{"kernel", Align::left}, {"forward", Align::left}, {"backward", Align::left}});
  for (const Json& kernel : kernels) {
    const std::string name = kernel["name"];
    const auto cell = [&](const char* pass, Pass which) {
      if (!kernel[pass]["ok"].get<bool>())
        return command.why ? "no: " + kernel[pass]["reason"].get<std::string>() : std::string("no");
      return name == chosen(which) ? good("runs") : std::string("can");
    };
    table.add({name, cell("forward", Pass::forward), cell("backward", Pass::backward)});
  }
  print_text(table.to_string());
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    if (plan->kernel_name(pass).empty()) print("{}\n", bad(why_no_kernel(*plan, pass)));
  }
  return kSuccess;
}

}  // namespace

Command add_info(CLI::App& app) {
  CLI::App* parser = app.add_subcommand("info", "Print the machine, the kernels, and which of them runs a problem");
  parser->footer(
      "\nKernels are listed fastest first; the first that can run is chosen. Problems are on the CPU unless --device "
      "says "
      "cuda.\n"
      "Examples: longspan info --why --dtype f16 --head-dim 100\n"
      "          longspan info --why --device cuda --dtype bf16");
  const auto command = std::make_shared<InfoCommand>();
  command->problem.add_to(*parser);
  parser->add_flag("--why", command->why, "Say why each kernel that cannot run refuses");
  parser->add_flag("--json", command->json, "Machine-readable output (always with the reasons)");
  return {parser, [command] { return run(*command); }};
}

}  // namespace longspan::cli
