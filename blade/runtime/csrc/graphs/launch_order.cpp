// SPDX-License-Identifier: Apache-2.0
#include "graphs/launch_order.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace blade {

LaunchOrder& LaunchOrder::of(c10::Device device, Stream stream) {
  using Key = std::tuple<c10::DeviceType, c10::DeviceIndex, Stream>;
  static std::mutex mutex;
  static auto* all = new std::map<Key, LaunchOrder>();
  const std::lock_guard<std::mutex> lock(mutex);
  return (*all)[{device.type(), device.index(), stream}];
}

void LaunchOrder::add(int64_t number, const Loans& loans) {
  const std::lock_guard<std::mutex> lock(turn_);
  const auto is_over = [](const Lender& one) { return one.out.expired(); };
  lenders_.erase(std::remove_if(lenders_.begin(), lenders_.end(), is_over), lenders_.end());
  lenders_.push_back({number, loans.count()});
}

bool LaunchOrder::may_launch(int64_t number) {
  return std::none_of(lenders_.begin(), lenders_.end(), [number](const Lender& one) {
    if (one.number <= number) return false;
    const auto out = one.out.lock();
    return out && out->load(std::memory_order_acquire) > 0;
  });
}

}  // namespace blade
