// What a correct kernel returns, and how far from it rounding may take it. Used by the tests and by `longspan check`.
//
// Every output is a sum of terms. With u the unit roundoff of float32 (2^-24) and u_s that of the storage type:
//  - One rounding errs by u / sqrt(3) in the mean square. A score is a sum of D products whose partial sums grow to at
//    most A, the sum of absolute products (times scale, plus ALiBi): sqrt(D / 3) A u / sqrt(3) in a random walk. exp
//    turns that into a relative error of P, and the denominator carries it once more. Sums of n terms add sqrt(n / 3)
//    u, and exp, log, division and scaling a few u.
//        relative32 = lambda * u * (2/3 sqrt(D) A + sqrt(n / 3) + 8)          lambda = 4 standard deviations
//    The error of an element is at most relative32 times the sum of absolute values of its terms ("magnitude").
//  - In 16-bit storage a float32 computation rounds P (or dS) and the result: u_s of the magnitude each, and the
//    gradients see delta through an `out` that was rounded too. We allow twice that:
//        forward  2 * (u_s + u_s) + relative32        gradients  2 * (3 u_s) + relative32
//    and, since worst cases are far from typical ones, also compare root mean squares with a float64 computation that
//    rounds at just those places: at most 2 times its error (where there are enough elements, and for gradients enough
//    queries, to speak of a mean), with relative32 of the magnitude added to the model's, which knows nothing of
//    float32 scores.
//  - With allow_tf32, float32 operands may be rounded to 11 bits (u_t = 2^-11). A product then errs by sqrt(2/3) u_t in
//  the
//    mean square, a score by that times B = scale * sqrt(sum of squared products), and its exp relatively by the same.
//    P and V are rounded too; gradients also see delta through an out with this error, dP and dS:
//        score = lambda sqrt(2/3) u_t B       forward  score + 4 u_t       lse  score       gradients  2 score + 8 u_t
//  - lse is never stored in 16 bits; kernels may compute exp to u_s / 16 there (far below the rounding of P).
#pragma once

#include "kernels/kernel.h"
#include "longspan/reference.h"

namespace longspan::reference {

/// Only plan, call, ranges, q, k, v (and dout) of the arguments are read. With `gradients` false only out and lse.
Expectation expect(const BackwardArguments& arguments, bool gradients = true);

/// Chosen rows of a large problem: out, lse and dq of the query ranges alone.
Expectation expect_queries(const BackwardArguments& arguments);
/// Rows `positions` of dk and dv alone, from lse and out as the arguments give them. The query ranges must hold every
/// row that attends to these positions.
Expectation expect_keys(const BackwardArguments& arguments, std::span<const std::int64_t> positions);

}  // namespace longspan::reference
