// SPDX-License-Identifier: Apache-2.0
#include "memory/borrowed_outputs.h"

#include <mutex>
#include <unordered_map>

namespace blade {
namespace {

struct Known {
  std::mutex mutex;
  std::unordered_map<const c10::StorageImpl*, int> storages;  // how many say so
};

Known& known() {
  static auto* instance = new Known();  // engines may outlive static objects
  return *instance;
}

}  // namespace

BorrowedStorage::BorrowedStorage(const c10::Storage& storage) : storage_(storage) {
  const std::lock_guard<std::mutex> lock(known().mutex);
  ++known().storages[storage_.unsafeGetStorageImpl()];
}

BorrowedStorage::~BorrowedStorage() {
  const std::lock_guard<std::mutex> lock(known().mutex);
  const auto found = known().storages.find(storage_.unsafeGetStorageImpl());
  if (--found->second == 0) known().storages.erase(found);
}

bool is_borrowed(const at::Tensor& tensor) {
  const std::lock_guard<std::mutex> lock(known().mutex);
  return known().storages.count(tensor.storage().unsafeGetStorageImpl()) != 0;
}

}  // namespace blade
