// What `longspan plan --ranks` says of a ring: what each rank exchanges and, over a link, how long it will take.
#pragma once

#include <string>

#include "json.h"
#include "longspan/cost.h"

namespace CLI {
class App;
}

namespace longspan::cli {

/// The options that make a plan one of a ring.
class RingForecast {
 public:
  void add_to(CLI::App& command);
  /// Checks the options against one another; `device` is the name of what is to be predicted. Null without --ranks.
  Json describe(const Plan& plan, const std::string& device) const;
  static void print_for_people(const Json& ring);

 private:
  Json exchanges(const Plan& plan, const Shards& shards) const;
  RingModel model(const Plan& plan, const std::string& device) const;

  int ranks_ = 0, ranks_per_device_ = 1;
  std::string link_, latency_ = "0", rate_;
};

}  // namespace longspan::cli
