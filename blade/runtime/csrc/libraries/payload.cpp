// SPDX-License-Identifier: Apache-2.0
// A zip file of two members, engine.json and model.onnx, each stored or deflated (blade/backends/shared/archive.py).
#include "libraries/payload.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <stdexcept>

#include "libraries/json.h"

// miniz's, which libtorch contains and exports, without a header.
extern "C" __attribute__((weak)) size_t tinfl_decompress_mem_to_mem(
    void* output, size_t output_size, const void* input, size_t input_size, int flags);

namespace blade {
namespace {

constexpr const char* kHead = "engine.json";
constexpr const char* kModel = "model.onnx";
constexpr uint32_t kEndSignature = 0x06054b50, kEntrySignature = 0x02014b50, kLocalSignature = 0x04034b50;
constexpr size_t kEndSize = 22, kEntrySize = 46, kLocalSize = 30;
constexpr size_t kMaxBytes = size_t{1} << 31;
constexpr uint16_t kStored = 0, kDeflated = 8, kEncrypted = 1;

[[noreturn]] void damaged_payload(const std::string& what) {
  throw std::runtime_error("what it was compiled to is damaged (" + what + ").");
}

// Little-endian fields of a zip file; every access is checked.
class ZipBytes {
 public:
  ZipBytes(const uint8_t* data, size_t size) : data_(data), size_(size) {}

  const uint8_t* at(size_t offset, size_t count) const {
    if (offset > size_ || count > size_ - offset) damaged_payload("it ends too early");
    return data_ + offset;
  }

  template <typename T>
  T get(size_t offset) const {
    T value;
    std::memcpy(&value, at(offset, sizeof(T)), sizeof(T));
    return value;
  }

  size_t size() const { return size_; }

 private:
  const uint8_t* data_;
  size_t size_;
};

std::string unpack_member(const ZipBytes& bytes, size_t entry) {
  const auto method = bytes.get<uint16_t>(entry + 10);
  const size_t packed = bytes.get<uint32_t>(entry + 20), size = bytes.get<uint32_t>(entry + 24);
  const size_t local = bytes.get<uint32_t>(entry + 42);
  if ((bytes.get<uint16_t>(entry + 8) & kEncrypted) != 0 || size > kMaxBytes) damaged_payload("a file in it is no plain file");
  if (bytes.get<uint32_t>(local) != kLocalSignature) damaged_payload("a file in it has no header");
  const size_t start = local + kLocalSize + bytes.get<uint16_t>(local + 26) + bytes.get<uint16_t>(local + 28);
  const uint8_t* data = bytes.at(start, packed);
  if (method == kStored && packed == size) return {reinterpret_cast<const char*>(data), size};
  if (method != kDeflated) damaged_payload("a file in it is compressed in another way");
  if (tinfl_decompress_mem_to_mem == nullptr) throw std::runtime_error("this libtorch does not export miniz, which unpacks it.");
  std::string unpacked(size, '\0');
  if (tinfl_decompress_mem_to_mem(unpacked.data(), size, data, packed, /*flags=*/0) != size) damaged_payload("a file in it does not unpack");
  return unpacked;
}

std::map<std::string, std::string> unpack_all(const ZipBytes& bytes) {
  if (bytes.size() < kEndSize) damaged_payload("it is no archive");
  const size_t end = bytes.size() - kEndSize;
  if (bytes.get<uint32_t>(end) != kEndSignature) damaged_payload("it is no archive");
  const size_t count = bytes.get<uint16_t>(end + 10);
  size_t entry = bytes.get<uint32_t>(end + 16);
  std::map<std::string, std::string> files;
  for (size_t i = 0; i < count; ++i) {
    if (bytes.get<uint32_t>(entry) != kEntrySignature) damaged_payload("its list of files is cut off");
    const size_t length = bytes.get<uint16_t>(entry + 28);
    const std::string name(reinterpret_cast<const char*>(bytes.at(entry + kEntrySize, length)), length);
    if (name != kHead && name != kModel) damaged_payload("it holds another file");
    if (!files.emplace(name, unpack_member(bytes, entry)).second) damaged_payload("it holds two files of one name");
    entry += kEntrySize + length + bytes.get<uint16_t>(entry + 30) + bytes.get<uint16_t>(entry + 32);
  }
  if (files.size() != 2) damaged_payload("a file in it is missing");
  return files;
}

std::vector<std::string> read_names(const Json& facts, const char* which) {
  auto names = facts.at(which).as_texts();
  if (std::set<std::string>(names.begin(), names.end()).size() != names.size()) damaged_payload("it has a name twice");
  return names;
}

std::optional<std::vector<int64_t>> read_order(const Json& order) {
  if (order.kind == Json::kNull) return std::nullopt;
  std::vector<int64_t> axes;
  for (const auto& axis : order.items) axes.push_back(axis.kind == Json::kInteger ? axis.integer : -1);
  auto sorted = axes;
  std::sort(sorted.begin(), sorted.end());
  for (size_t i = 0; i < sorted.size(); ++i) {
    if (sorted[i] != static_cast<int64_t>(i)) damaged_payload("an order of axes is none");
  }
  return axes;
}

LibraryPayload read_head(const Json& head) {
  LibraryPayload payload;
  for (const auto& [library, version] : head.at("stamp").members) payload.stamp.emplace_back(library, version.as_text());
  const Json& facts = head.at("facts");
  payload.weights = read_names(facts, "weights");
  payload.inputs = read_names(facts, "inputs");
  payload.outputs = read_names(facts, "outputs");
  payload.device = facts.at("device").as_text();
  for (const auto& order : facts.at("orders").items) payload.orders.push_back(read_order(order));
  return payload;
}

}  // namespace

std::string LibraryPayload::version_of(const std::string& library) const {
  for (const auto& [name, version] : stamp) {
    if (name == library) return version;
  }
  return "";
}

LibraryPayload read_payload(const at::Tensor& payload, size_t constants) {
  auto files = unpack_all(ZipBytes(payload.const_data_ptr<uint8_t>(), payload.nbytes()));
  LibraryPayload found;
  try {
    found = read_head(parse_json(files[kHead]));
  } catch (const std::runtime_error& error) {
    damaged_payload(error.what());
  }
  if (found.weights.size() != constants) damaged_payload("it has another number of weights than the engine");
  const size_t more = found.outputs.size() - found.orders.size();
  if (found.outputs.size() < found.orders.size() || more > 1) damaged_payload("its outputs do not fit their orders");
  found.model = std::move(files[kModel]);
  return found;
}

}  // namespace blade
