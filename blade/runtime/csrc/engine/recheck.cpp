// SPDX-License-Identifier: Apache-2.0
#include "engine/recheck.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <sstream>

namespace blade {
namespace {

// What of `tensor` can be added up: NaN and infinity as zero, halves as floats.
at::Tensor numbers_of(const at::Tensor& tensor) {
  const auto wide = tensor.is_complex() ? at::view_as_real(tensor) : tensor;
  return at::nan_to_num(wide.to(wide.scalar_type() == at::kDouble ? at::kDouble : at::kFloat), 0.0, 0.0, 0.0);
}

std::string difference(size_t i, const at::Tensor& got, const at::Tensor& want, double tolerance) {
  std::ostringstream text;
  text << "rechecked, output " << i << " of the engine ";
  if (got.scalar_type() != want.scalar_type() || got.sizes() != want.sizes() || got.device() != want.device()) {
    text << "has another form than the original's";
    return text.str();
  }
  if (want.numel() == 0) return "";
  if (!want.is_floating_point() && !want.is_complex()) {
    if (at::equal(got, want)) return "";
    text << "differs from the original's";
    return text.str();
  }
  if (!at::equal(at::isfinite(got), at::isfinite(want))) {
    text << "has NaN or infinity elsewhere than the original's";
    return text.str();
  }
  const auto reference = numbers_of(want);
  const double apart = (numbers_of(got) - reference).abs().max().item<double>();
  const double largest = reference.abs().max().item<double>();
  if (apart <= tolerance * largest) return "";
  text << "is " << apart << " from the original's, whose largest magnitude is " << largest;
  return text.str();
}

}  // namespace

void Recheck::set(int64_t every, int64_t tolerance, int64_t max_failures) {
  every_ = every;
  tolerance_ = tolerance;
  max_failures_ = max_failures;
}

bool Recheck::is_due() {
  if (every_ <= 0) return false;
  if (failures_.load(std::memory_order_relaxed) > 0) return true;
  return answers_.fetch_add(1, std::memory_order_relaxed) % every_ == every_ - 1;
}

std::string Recheck::compare(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& want) {
  const c10::InferenceMode ordinary_tensors(false);
  const c10::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below;
  count_.fetch_add(1, std::memory_order_relaxed);
  std::string why;
  try {
    if (got.size() != want.size()) why = "rechecked, the engine has another number of outputs";
    for (size_t i = 0; i < want.size() && why.empty(); ++i) {
      why = difference(i, got[i].detach(), want[i].detach(), static_cast<double>(tolerance_) * 1e-9);
    }
  } catch (const std::exception& error) {
    why = std::string("rechecked, the engine's answer cannot be compared: ") + error.what();
  }
  if (why.empty()) {
    failures_ = 0;
  } else {
    ++failures_;
  }
  return why;
}

}  // namespace blade
