// Exchanges and predictions, as JSON first; people read tables made of it.
#include "ring/predicted.h"

#include <CLI/CLI.hpp>

#include "console.h"
#include "interrupt.h"
#include "longspan/error.h"
#include "units.h"

namespace longspan::cli {
namespace {

constexpr int kMostRanks = 4096;
constexpr const char* kLimits[] = {"compute", "messages", "link"};

Json as_json(const PassPrediction& pass) {
  return {{"seconds", pass.total},
          {"compute_seconds", pass.compute},
          {"hiding_seconds", pass.hiding},
          {"message_seconds", pass.messages},
          {"transfer_seconds", pass.transfer},
          {"waiting_seconds", pass.waiting}};
}

Json as_json(const RankPrediction& rank) {
  return {{"rank", rank.rank},
          {"rows", rank.rows},
          {"messages_sent", rank.messages_sent},
          {"messages_received", rank.messages_received},
          {"bytes_sent", rank.bytes_sent},
          {"bytes_received", rank.bytes_received},
          {"gradient_bytes_sent", rank.gradient_bytes_sent},
          {"gradient_bytes_received", rank.gradient_bytes_received},
          {"forward", as_json(rank.forward)},
          {"backward", as_json(rank.backward)}};
}

Json as_json(const PassRates& rates) {
  return {{"flops_per_second", rates.flops_per_second},
          {"row_bytes_per_second", rates.row_bytes_per_second},
          {"call_seconds", rates.call_seconds},
          {"message_bytes_per_second", rates.message_bytes_per_second}};
}

Json as_json(const RingPrediction& prediction, const RingModel& model, const Plan& plan) {
  Json ranks = Json::array();
  for (const RankPrediction& rank : prediction.listed) ranks.push_back(as_json(rank));
  const Branch& branch = plan.pattern().branches()[prediction.limiting_branch];
  const std::int64_t segment = std::min(branch.segment, plan.problem().tokens);
  return {
      {"device",
       {{"name", model.device.name},
        {"source", model.device.source},
        {"measured", model.device.measured},
        {"forward", as_json(model.device.forward)},
        {"backward", as_json(model.device.backward)}}},
      {"link", {{"bytes_per_second", model.link.bytes_per_second}, {"latency_seconds", model.link.latency_seconds}}},
      {"ranks_per_device", model.ranks_per_device},
      {"ranks_looked_at", prediction.listed.size()},
      {"slowest_rank", prediction.listed[prediction.slowest].rank},
      {"forward_seconds", prediction.forward_seconds},
      {"backward_seconds", prediction.backward_seconds},
      {"step_seconds", prediction.forward_seconds + prediction.backward_seconds},
      {"one_device_forward_seconds", prediction.one_device_forward_seconds},
      {"one_device_backward_seconds", prediction.one_device_backward_seconds},
      {"efficiency", prediction.efficiency},
      {"limit",
       {{"by", kLimits[static_cast<std::size_t>(prediction.limit)]},
        {"branch", prediction.limiting_branch},
        {"segment", segment},
        {"dilation", branch.dilation},
        {"share", prediction.limiting_share}}},
      {"per_rank", ranks}};
}

void print_exchanges(const Json& ring) {
  print("\na ring of {} (one forward, received by each rank)\n", ring["ranks"].get<int>());
  Table table({{"rank", Align::left}, {"rows"}, {"peers"}, {"longspan"}, {"sent"}, {"all-gather"}, {"naive ring"}});
  for (const Json& rank : ring["per_rank"]) {
    const auto bytes = [&](const char* key) { return short_bytes(rank[key].get<double>()); };
    table.add({fmt::format("{}", rank["rank"].get<int>()), with_commas(rank["rows"].get<double>()),
               fmt::format("{}", rank["peers"].get<int>()), bytes("bytes_received"), bytes("bytes_sent"),
               bytes("all_gather_bytes"), bytes("naive_ring_bytes")});
  }
  print_text(table.to_string());
}

void print_prediction(const Json& ring) {
  const Json& predicted = ring["prediction"];
  const Json& device = predicted["device"];
  const auto seconds = [](const Json& of, const char* key) { return short_duration(of[key].get<double>()); };
  print("\na ring of {} on {} over {:.4g} GB/s with {} of latency, predicted\nrates: {}, {}\n",
        ring["ranks"].get<int>(), device["name"].get<std::string>(),
        predicted["link"]["bytes_per_second"].get<double>() * 1e-9, seconds(predicted["link"], "latency_seconds"),
        device["measured"].get<bool>() ? "measured" : "not measured", device["source"].get<std::string>());
  Table table({{"rank", Align::left},
               {"rows"},
               {"messages"},
               {"received"},
               {"sent"},
               {"pass", Align::left},
               {"compute"},
               {"transfer"},
               {"hides"},
               {"waits"},
               {"step"}});
  for (const Json& rank : predicted["per_rank"]) {
    for (const bool forward : {true, false}) {
      const Json& pass = rank[forward ? "forward" : "backward"];
      const auto bytes = [&](const char* ahead, const char* back) {
        return short_bytes(rank[forward ? ahead : back].get<double>());
      };
      const double transfer = pass["transfer_seconds"], waits = pass["waiting_seconds"];
      table.add({forward ? fmt::format("{}", rank["rank"].get<int>()) : "",
                 forward ? with_commas(rank["rows"].get<double>()) : "",
                 fmt::format("{}", rank[forward ? "messages_received" : "messages_sent"].get<std::int64_t>()),
                 bytes("bytes_received", "gradient_bytes_received"), bytes("bytes_sent", "gradient_bytes_sent"),
                 forward ? "forward" : "backward", seconds(pass, "compute_seconds"), short_duration(transfer),
                 transfer > 0 ? fmt::format("{:.0f}%", 100 * (1 - waits / transfer)) : "", short_duration(waits),
                 seconds(pass, "seconds")});
    }
  }
  print_text(table.to_string());
  const std::size_t looked = predicted["ranks_looked_at"];
  if (looked < ring["ranks"].get<std::size_t>())
    print("{} of {} ranks were looked at: both ends, the middle and some between\n", looked, ring["ranks"].get<int>());
  const Json& limit = predicted["limit"];
  print("step {} (forward {}, backward {}) on rank {}; one device {} + {}: efficiency {:.1f}%\n",
        seconds(predicted, "step_seconds"), seconds(predicted, "forward_seconds"),
        seconds(predicted, "backward_seconds"), predicted["slowest_rank"].get<int>(),
        seconds(predicted, "one_device_forward_seconds"), seconds(predicted, "one_device_backward_seconds"),
        100 * predicted["efficiency"].get<double>());
  const std::string by = limit["by"];
  const bool computing = by == "compute";
  print("{}: branch {} ({}/{}) {} {:.0f}% of {}\n",
        computing          ? "computing limits"
        : by == "messages" ? "messages limit, by their number"
                           : "the link limits",
        limit["branch"].get<int>(), limit["segment"].get<std::int64_t>(), limit["dilation"].get<std::int64_t>(),
        computing ? "takes" : "brings", 100 * limit["share"].get<double>(), computing ? "the computing" : "the bytes");
}

}  // namespace

void RingForecast::add_to(CLI::App& command) {
  command.add_option("--ranks", ranks_, "Also what the ranks of a ring would exchange")->type_name("COUNT");
  command
      .add_option("--link", link_, "With --ranks: predict times over a network of this rate, such as 50GB/s or 400Gb/s")
      ->type_name("RATE");
  command.add_option("--latency", latency_, "With --link: latency of a message, such as 5us")->type_name("TIME");
  command
      .add_option("--rate", rate_,
                  "With --link: what the device reaches instead, forward,backward: 560TFLOP/s,580TFLOP/s")
      ->type_name("RATES");
  command.add_option("--ranks-per-device", ranks_per_device_, "With --link: ranks that share a device")
      ->type_name("COUNT");
}

/// What each rank would receive and send, beside what other rings move.
Json RingForecast::exchanges(const Plan& plan, const Shards& shards) const {
  Json ranks = Json::array();
  for (int rank = 0; rank < ranks_; ++rank) {
    stop_if_interrupted();
    const ExchangePlan exchange(plan, shards, rank);
    ranks.push_back({{"rank", rank},
                     {"rows", shards.rows(rank)},
                     {"peers", exchange.peers().size()},
                     {"bytes_received", exchange.bytes_received()},
                     {"bytes_sent", exchange.bytes_sent()},
                     {"gradient_bytes_returned", exchange.receive_pairs() * exchange.gradient_bytes_per_pair()},
                     {"naive_ring_bytes", exchange.naive_ring_bytes()},
                     {"all_gather_bytes", exchange.all_gather_bytes()}});
  }
  return ranks;
}

RingModel RingForecast::model(const Plan& plan, const std::string& device) const {
  const Problem& problem = plan.problem();
  RingModel model;
  model.link = {parse_rate("link", link_), parse_duration("latency", latency_)};
  model.device = device_rates(device, problem.dtype, problem.head_dim);
  if (!rate_.empty()) {
    const std::size_t comma = rate_.find(',');
    model.device.forward.flops_per_second = parse_flops("rate", rate_.substr(0, comma));
    model.device.backward.flops_per_second = comma == std::string::npos ? model.device.forward.flops_per_second
                                                                        : parse_flops("rate", rate_.substr(comma + 1));
    model.device.source = fmt::format("FLOP/s as --rate says, all else from {}", model.device.source);
  }
  if (ranks_per_device_ < 1 || ranks_per_device_ > ranks_) {
    throw InvalidArgument("ranks-per-device",
                          fmt::format("--ranks-per-device is {}: give 1 to --ranks, {}", ranks_per_device_, ranks_));
  }
  model.ranks_per_device = ranks_per_device_;
  return model;
}

Json RingForecast::describe(const Plan& plan, const std::string& device) const {
  const bool timed = !link_.empty();
  if (!timed && (latency_ != "0" || !rate_.empty() || ranks_per_device_ != 1))
    throw InvalidArgument("link", "--latency, --rate and --ranks-per-device belong to a prediction: give --link, too");
  if (ranks_ < 0) throw InvalidArgument("ranks", fmt::format("--ranks is {}: give at least 1", ranks_));
  if (ranks_ == 0) {
    if (timed) throw InvalidArgument("ranks", "--link is the network of a ring: give --ranks, too");
    return {};
  }
  const std::int64_t tokens = plan.problem().tokens;
  if (ranks_ > kMostRanks || (timed && ranks_ > tokens)) {
    throw InvalidArgument(
        "ranks", fmt::format("--ranks is {}: give at most {}{}", ranks_, std::min<std::int64_t>(kMostRanks, tokens),
                             ranks_ > kMostRanks ? "" : ", one for each token"));
  }
  for (const BranchPlan& branch : plan.branches()) {
    if (branch.mask) branch.mask->make_lists(&interrupted());
  }
  const Shards shards = Shards::even(tokens, ranks_);
  Json ring = {{"ranks", ranks_}};
  if (!timed) {
    ring["per_rank"] = exchanges(plan, shards);
    return ring;
  }
  const RingModel chosen = model(plan, device);
  ring["prediction"] = as_json(predict_ring(plan, shards, chosen, 64, stop_if_interrupted), chosen, plan);
  return ring;
}

void RingForecast::print_for_people(const Json& ring) {
  if (ring.contains("prediction")) print_prediction(ring);
  else if (!ring.is_null()) print_exchanges(ring);
}

}  // namespace longspan::cli
