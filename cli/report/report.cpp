// The page around the pictures.
#include "report/report.h"

#include <fmt/format.h>

#include <algorithm>

#include "console.h"
#include "report/pictures.h"

namespace longspan::cli {
namespace {

constexpr std::string_view kStyle = R"css(
:root { color-scheme: light dark; --page: #f6f7f9; --card: #ffffff; --text: #1b2030; --muted: #5b6478; --line: #e1e5ec;
  --track: #e7eaf0; --mark: #ffffff; --row: #11151f; --good: #14804a; --bad: #c22f2f;
  --c0: #2f6fed; --c1: #e8833a; --c2: #2aa775; --c3: #b04fc4; --c4: #d64562; --c5: #1d9bb5; --c6: #8a7a1f; --c7: #6a6fe0; }
@media (prefers-color-scheme: dark) {
  :root { --page: #10131a; --card: #191d27; --text: #e8ebf2; --muted: #98a2b8; --line: #2a3040;
    --track: #2a3040; --mark: #191d27; --row: #ffffff; --good: #4cd08c; --bad: #ff7b7b;
    --c0: #6f9dff; --c1: #f5a566; --c2: #55cf9f; --c3: #d08be0; --c4: #f27c93; --c5: #5cc6dc; --c6: #cdbb55; --c7: #a3a7ff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: clamp(16px, 4vw, 48px); }
h1 { font-size: clamp(26px, 5vw, 40px); line-height: 1.15; margin: 0 0 8px; letter-spacing: -0.02em; }
h2 { font-size: 21px; margin: 0 0 4px; letter-spacing: -0.01em; }
h3 { font-size: 16px; margin: 0 0 2px; display: flex; align-items: center; gap: 8px; }
p { margin: 0 0 12px; color: var(--muted); }
header { margin-bottom: 28px; }
.badge { display: inline-block; padding: 4px 12px; border-radius: 999px; font-weight: 600; font-size: 14px; margin-bottom: 14px;
  border: 1.5px solid currentColor; }
.pass { color: var(--good); } .fail { color: var(--bad); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 14px; padding: clamp(16px, 3vw, 28px);
  margin-bottom: 20px; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 1px; background: var(--line);
  padding: 0; overflow: hidden; }
.facts div { background: var(--card); padding: 18px 20px; }
.facts b { display: block; font-size: 24px; line-height: 1.25; letter-spacing: -0.02em; font-variant-numeric: tabular-nums; }
.facts span { color: var(--muted); font-size: 14px; }
svg { display: block; width: 100%; }
.strip { height: 18px; border-radius: 4px; } .tall { height: 26px; margin-top: 10px; }
.ends { display: flex; justify-content: space-between; color: var(--muted); font-size: 12.5px; margin-top: 3px;
  font-variant-numeric: tabular-nums; }
.branch { padding: 18px 0; border-top: 1px solid var(--line); } .branch:last-child { padding-bottom: 0; }
.key { width: 13px; height: 13px; border-radius: 4px; flex: none; display: inline-block; }
.coverage { display: grid; grid-template-columns: auto 1fr; gap: 0 12px; }
.coverage .grid { height: calc(var(--heads) * 22px); }
.heads { display: grid; grid-template-rows: repeat(var(--heads), 22px); font-size: 12.5px; color: var(--muted); white-space: nowrap;
  align-items: center; }
.legend { display: flex; flex-wrap: wrap; gap: 6px 18px; font-size: 14px; color: var(--muted); margin-top: 14px; }
.legend span { display: inline-flex; align-items: center; gap: 7px; }
.bar p { display: flex; justify-content: space-between; gap: 12px; margin: 12px 0 0; } .bar b { color: var(--text); white-space: nowrap; }
.bar .tall { margin-top: 4px; } .bar-note { margin: 8px 0 0; text-align: right; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 8px 6px; border-bottom: 1px solid var(--line); }
th { color: var(--muted); font-weight: 500; font-size: 14px; } tr:last-child td { border-bottom: 0; }
th:first-child, td:first-child { text-align: left; }
.plain td:first-child { color: var(--muted); } .plain td { overflow-wrap: anywhere; }
@media (max-width: 560px) { th, td { padding: 7px 4px; font-size: 13.5px; } }
code { font: 13.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
footer { color: var(--muted); font-size: 14px; }
rect { shape-rendering: geometricPrecision; } .track { fill: var(--track); } .mark { fill: var(--mark); } .row { fill: var(--row); }
.soft { opacity: 0.35; } .none { background: var(--track); }
)css";

std::string colour_rules() {
  std::string rules;
  for (int i = 0; i < 8; ++i) rules += fmt::format(".c{0} {{ fill: var(--c{0}); background: var(--c{0}); }}\n", i);
  return rules;
}

std::string legend(const Plan& plan) {
  std::string html = R"(<div class="legend">)";
  for (std::size_t index = 0; index < plan.branches().size(); ++index) {
    html += fmt::format(R"(<span><i class="key c{}"></i>branch {}: {:.3g}% of its heads' rows</span>)", index % 8,
                        index, 100.0 / static_cast<double>(plan.branches()[index].dilation));
  }
  return html + R"(<span><i class="key none"></i>covered by none: output 0</span></div>)";
}

/// CPUs in GFLOP/s, as ever; what would take six digits in TFLOP/s.
std::string speed(double gflops) {
  return gflops < 1e5 ? fmt::format("{:.1f} GFLOP/s", gflops) : fmt::format("{:.1f} TFLOP/s", gflops * 1e-3);
}

/// With several devices every line says which one it is about.
std::string labelled(const Report& report, const ReportRun& run, const std::string& name) {
  return report.runs.size() > 1 ? fmt::format("{} {}", run.device, name) : name;
}

std::string facts(const Report& report) {
  const auto fact = [](std::string_view value, std::string_view name) {
    return fmt::format("<div><b>{}</b><span>{}</span></div>", escape_html(value), escape_html(name));
  };
  std::string html = fact(with_commas(static_cast<double>(report.plan->problem().tokens)), "tokens");
  for (const ReportRun& run : report.runs) {
    for (const ReportPass& pass : run.passes) {
      html += fact(short_duration(pass.seconds), labelled(report, run, pass.name));
      html += fact(speed(pass.gflops), labelled(report, run, pass.name));
    }
  }
  html += fact(short_bytes(report.runs.front().extra_bytes), "extra memory, measured");
  return R"(<section class="facts">)" + html + "</section>";
}

std::string checks_table(const Report& report) {
  std::string html =
      "<table><tr><th>compared</th><th>rows</th><th>largest error</th><th>of tolerance</th><th></th></tr>";
  for (const ReportRun& run : report.runs) {
    for (const RowCheck& check : run.checks) {
      html += fmt::format("<tr><td>{}</td><td>{}</td><td>{:.2e}</td><td>{:.1f}%</td><td class=\"{}\">{}</td></tr>",
                          escape_html(labelled(report, run, check.name)), with_commas(check.rows), check.largest_error,
                          check.over_tolerance * 100, check.ok ? "pass" : "fail", check.ok ? "ok" : "over");
    }
  }
  return html + "</table>";
}

}  // namespace

bool Report::verified() const {
  return std::all_of(runs.begin(), runs.end(), [](const ReportRun& run) { return run.verified; });
}

std::vector<std::pair<std::string, std::string>> summary_rows(const Report& report) {
  const Problem& problem = report.plan->problem();
  std::vector<std::pair<std::string, std::string>> rows = {
      {"tokens", with_commas(problem.tokens)},
      {"heads", fmt::format("{} of {}, {}", problem.heads, problem.head_dim, name_of(problem.dtype))},
  };
  double worst = 0;
  for (const ReportRun& run : report.runs) {
    for (const ReportPass& pass : run.passes) {
      rows.emplace_back(labelled(report, run, pass.name),
                        fmt::format("{}, {} ({:.0f}% of peak), kernel {}", short_duration(pass.seconds),
                                    speed(pass.gflops), 100 * pass.gflops / pass.peak.gflops, pass.kernel));
    }
    for (const RowCheck& check : run.checks) worst = std::max(worst, check.over_tolerance);
    rows.emplace_back(labelled(report, run, "memory"), fmt::format("{} extra, measured", short_bytes(run.extra_bytes)));
  }
  rows.emplace_back("largest error", fmt::format("{:.1f}% of its tolerance", worst * 100));
  rows.emplace_back("dense scores", fmt::format("{} would have been needed", short_bytes(report.dense_bytes)));
  return rows;
}

std::string render_report(const Report& report) {
  const Plan& plan = *report.plan;
  std::string rows;
  const auto add_row = [&](std::string_view name, std::string_view value) {
    rows += fmt::format("<tr><td>{}</td><td>{}</td></tr>", escape_html(name), escape_html(value));
  };
  for (const auto& [name, value] : summary_rows(report)) add_row(name, value);
  add_row("machine", report.machine);
  for (const ReportRun& run : report.runs) {
    add_row(run.device, run.summary);
    for (const ReportPass& pass : run.passes) {
      add_row(labelled(report, run, "peak of " + pass.name),
              fmt::format("{} measured: {}", speed(pass.peak.gflops), pass.peak.source));
    }
  }
  add_row("pattern", plan.pattern().to_string() + (plan.options().causal ? ", causal" : ""));

  std::string where;
  for (const ReportRun& run : report.runs) where += (where.empty() ? "" : " and on ") + run.summary;

  std::string html = "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n";
  html += "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>Longspan demo</title>\n";
  html += fmt::format("<style>{}{}</style>\n</head>\n<body>\n<main>\n", kStyle, colour_rules());
  html += fmt::format(
      "<header><span class=\"badge {}\">{}</span>\n<h1>Dilated attention over {} tokens</h1>\n"
      "<p>Forward and backward on {}, compared row by row with a float64 computation of the "
      "definition.</p></header>\n",
      report.verified() ? "pass" : "fail",
      report.verified() ? "Verified against the float64 reference" : "Differs from the float64 reference",
      with_commas(static_cast<double>(plan.problem().tokens)), escape_html(where));
  html += facts(report) + "\n";
  html +=
      "<section><h2>Which keys a row sees</h2><p>Every branch cuts the sequence into segments and keeps each d-th row. "
      "One row of "
      "each branch, near the middle (black in light mode, white in dark), and the keys it attends to.</p>" +
      keys_picture(plan) + "</section>\n";
  html +=
      "<section><h2>Which branch covers a row</h2><p>The first positions of the sequence, one line per head; the "
      "picture repeats "
      "along the sequence.</p>" +
      coverage_picture(plan) + legend(plan) + "</section>\n";
  html += "<section><h2>Memory</h2><p>On a logarithmic scale: each further length is a factor, not a sum.</p>" +
          memory_picture(report.runs.front().extra_bytes, report.dense_bytes) + "</section>\n";
  html +=
      "<section><h2>Compared with the reference</h2><p>Rows from every branch, from the first and the last segment, "
      "computed "
      "again in float64 from the definition.</p>" +
      checks_table(report) + "</section>\n";
  html += fmt::format("<section><h2>The run</h2><table class=\"plain\">{}</table></section>\n", rows);
  html += fmt::format("<footer>Repeat it: <code>{}</code><br>{}</footer>\n</main>\n</body>\n</html>\n",
                      escape_html(report.command), escape_html(report.version));
  return html;
}

}  // namespace longspan::cli
