// Makes a Kernel of an Engine.
#pragma once

#include "kernels/cpu/drive.h"

namespace longspan::cpu {

template <const Engine& kEngine>
constexpr Kernel kernel_of(std::string_view name) {
  return {.name = name,
          .can_run = [](const Plan& plan, Pass pass) { return can_run(kEngine, plan, pass); },
          .workspace_bytes = [](const Plan& plan, Pass pass,
                                int threads) { return workspace_bytes(kEngine, plan, pass, threads); },
          .forward = [](const ForwardArguments& arguments) { run_forward(kEngine, arguments); },
          .backward = [](const BackwardArguments& arguments) { run_backward(kEngine, arguments); },
          .runs_parts = true};
}

}  // namespace longspan::cpu
