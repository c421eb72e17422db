// Ctrl-C while compiled code runs.
#pragma once

#include <nanobind/nanobind.h>

#include <chrono>
#include <memory>
#include <optional>
#include <utility>

#include "longspan/error.h"

namespace longspan::python {

namespace nb = nanobind;

/// What a transport in Python raised that is no error (KeyboardInterrupt, SystemExit): it ends the call as it is.
class Interrupted : public Cancelled {
 public:
  explicit Interrupted(nb::python_error raised)
      : Cancelled("interrupted"), raised_(std::make_shared<nb::python_error>(std::move(raised))) {}
  nb::python_error& raised() const { return *raised_; }

 private:
  std::shared_ptr<nb::python_error> raised_;
};

/// Lets Ctrl-C stop a call: asks Python for pending signals ten times a second, from the calling thread only. Threads
/// that Python gives no signals may be given a threading.Event to look at.
class SignalCheck {
 public:
  explicit SignalCheck(nb::handle stop = nb::none()) : stop_(stop) {}

  /// The hook for Call::progress; false cancels the call.
  bool operator()() {
    const auto now = Clock::now();
    if (now - last_ < kInterval) return true;
    last_ = now;
    nb::gil_scoped_acquire lock;
    if (PyErr_CheckSignals() == 0) return stop_.is_none() || !nb::cast<bool>(stop_.attr("is_set")());
    interruption_.emplace();  // takes the pending KeyboardInterrupt (or whatever the handler raised)
    return false;
  }

  /// Runs work without the interpreter lock; what a signal handler raised replaces the Cancelled that it caused.
  template <class Work>
  void run(Work&& work) {
    try {
      nb::gil_scoped_release unlocked;
      work();
    } catch (const Interrupted& error) {
      throw nb::python_error(std::move(error.raised()));
    } catch (const Cancelled&) {
      if (!interruption_) throw;
      throw nb::python_error(std::move(*interruption_));
    }
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds kInterval{100};
  nb::handle stop_;
  Clock::time_point last_ = Clock::now();
  std::optional<nb::python_error> interruption_;
};

}  // namespace longspan::python
