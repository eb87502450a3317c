// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/Parallel.h>
#include <unistd.h>

#include <utility>

#include "libraries/native_runner.h"

namespace blade {

template <typename Session>
Sessions<Session>::Sessions(std::vector<at::Tensor> constants, Start start)
    : constants_(std::move(constants)), start_(std::move(start)), versions_(versions()), process_(getpid()) {}

template <typename Session>
int64_t Sessions<Session>::versions() const {
  int64_t sum = 0;
  for (const auto& tensor : constants_) sum += tensor.is_inference() ? 0 : static_cast<int64_t>(tensor._version());
  return sum;
}

template <typename Session>
std::shared_ptr<Session> Sessions<Session>::get() {
  const int threads = at::get_num_threads();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (process_ != getpid()) {
    // what the parent started is never freed here: a destructor would wait for threads that are not there
    new std::map<int, std::shared_ptr<Session>>(std::move(made_));
    made_.clear();
    process_ = getpid();
  }
  if (const int64_t now = versions(); now != versions_) {
    made_.clear();
    versions_ = now;
  }
  auto& session = made_[threads];
  if (!session) session = start_(threads);
  return session;
}

}  // namespace blade
