// SPDX-License-Identifier: Apache-2.0
#include "libraries/onnx_bytes.h"

#include <algorithm>
#include <set>
#include <stdexcept>
#include <string_view>

namespace blade {
namespace {

enum class Message : uint8_t { kModel, kTraining, kGraph, kFunction, kNode, kAttribute, kTensor, kSparse };
enum Wire : uint8_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

// Field numbers of onnx.proto, which are part of the file format: a message inside of a message.
struct Inside {
  Message outer;
  uint64_t field;
  Message inner;
};
constexpr Inside kInside[] = {
    {Message::kModel, 7, Message::kGraph},        {Message::kModel, 20, Message::kTraining},
    {Message::kModel, 25, Message::kFunction},    {Message::kTraining, 1, Message::kGraph},
    {Message::kTraining, 2, Message::kGraph},     {Message::kGraph, 1, Message::kNode},
    {Message::kGraph, 5, Message::kTensor},       {Message::kGraph, 15, Message::kSparse},
    {Message::kFunction, 7, Message::kNode},      {Message::kFunction, 11, Message::kAttribute},
    {Message::kNode, 5, Message::kAttribute},     {Message::kAttribute, 5, Message::kTensor},
    {Message::kAttribute, 6, Message::kGraph},    {Message::kAttribute, 10, Message::kTensor},
    {Message::kAttribute, 11, Message::kGraph},   {Message::kAttribute, 22, Message::kSparse},
    {Message::kAttribute, 23, Message::kSparse},  {Message::kSparse, 1, Message::kTensor},
    {Message::kSparse, 2, Message::kTensor},
};
constexpr uint64_t kGraphField = 7, kInitializerField = 5, kNodeDomain = 7, kFunctionDomain = 10;
constexpr uint64_t kDims = 1, kDataType = 2, kName = 8, kRawData = 9, kExternalData = 13, kDataLocation = 14;
constexpr int kDeepestModel = 64;

[[noreturn]] void bad_model(const std::string& what) { throw std::runtime_error("the model is not used: " + what + "."); }

struct Field {
  uint64_t number = 0, value = 0;
  Wire wire = kVarint;
  std::string_view bytes;
};

class Fields {
 public:
  explicit Fields(std::string_view message) : message_(message) {}

  bool next(Field& field) {
    if (at_ == message_.size()) return false;
    const uint64_t tag = varint();
    field = {tag >> 3, 0, static_cast<Wire>(tag & 7), {}};
    if (field.number == 0 || field.number >= 1U << 29) bad_model("it is no ONNX model");
    if (field.wire == kVarint) {
      field.value = varint();
    } else if (field.wire == kBytes) {
      field.bytes = take(varint());
    } else if (field.wire == kFixed64 || field.wire == kFixed32) {
      field.bytes = take(field.wire == kFixed64 ? 8 : 4);
    } else {
      bad_model("its bytes are no protocol buffer");
    }
    return true;
  }

 private:
  uint64_t varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 70 && at_ < message_.size(); shift += 7) {
      const auto byte = static_cast<uint8_t>(message_[at_++]);
      if (shift < 64) value |= static_cast<uint64_t>(byte & 127) << shift;
      if (byte < 128) return value;
    }
    bad_model("it is no ONNX model, or one that was cut off");
  }

  std::string_view take(uint64_t size) {
    if (size > message_.size() - at_) bad_model("it is no ONNX model, or one that was cut off");
    at_ += size;
    return message_.substr(at_ - size, size);
  }

  std::string_view message_;
  size_t at_ = 0;
};

class ModelCheck {
 public:
  explicit ModelCheck(const std::vector<std::string>& given) : given_(given) {}

  void message(Message kind, std::string_view bytes, int depth, bool is_initializer) {
    if (depth > kDeepestModel) bad_model("it is nested too deep");
    if (kind == Message::kTensor) return tensor(bytes, is_initializer);
    Field field;
    bool has_graph = false;
    for (Fields fields(bytes); fields.next(field);) {
      domain(kind, field);
      for (const auto& row : kInside) {
        if (row.outer != kind || row.field != field.number) continue;
        if (field.wire != kBytes) bad_model("a message in it is none");
        has_graph |= kind == Message::kModel && row.inner == Message::kGraph;
        // a graph one level deep is the model's own
        message(row.inner, field.bytes, depth + 1, depth == 1 && kind == Message::kGraph);
      }
    }
    if (kind == Message::kModel && !has_graph) bad_model("it is no ONNX model: it has no graph");
  }

 private:
  static void domain(Message kind, const Field& field) {
    const bool is_one = (kind == Message::kNode && field.number == kNodeDomain) ||
                        (kind == Message::kFunction && field.number == kFunctionDomain);
    if (!is_one) return;
    if (field.wire != kBytes) bad_model("a domain in it is no text");
    if (!field.bytes.empty() && field.bytes != "ai.onnx") bad_model("it has ops of the domain '" + std::string(field.bytes) + "'");
  }

  void tensor(std::string_view bytes, bool is_initializer) {
    Field field;
    bool is_external = false;
    std::vector<std::string_view> names;
    for (Fields fields(bytes); fields.next(field);) {
      if (field.number == kName) names.push_back(field.bytes);
      is_external |= field.number == kExternalData;
      is_external |= field.number == kDataLocation && (field.wire != kVarint || field.value != 0);
    }
    if (!is_external) return;
    const std::string name(names.size() == 1 ? names[0] : "");
    if (!is_initializer || std::find(given_.begin(), given_.end(), name) == given_.end()) {
      bad_model("its tensor '" + name + "' is in another file");
    }
    if (!seen_.insert(name).second) bad_model("it has two tensors '" + name + "'");
  }

  const std::vector<std::string>& given_;
  std::set<std::string> seen_;
};

void put_varint(uint64_t value, std::string& bytes) {
  for (; value >= 128; value >>= 7) bytes += static_cast<char>(value | 128);
  bytes += static_cast<char>(value);
}

void put_number(uint64_t field, uint64_t value, std::string& bytes) {
  put_varint(field << 3 | kVarint, bytes);
  put_varint(value, bytes);
}

void put_length(uint64_t field, uint64_t length, std::string& bytes) {
  put_varint(field << 3 | kBytes, bytes);
  put_varint(length, bytes);
}

}  // namespace

int32_t onnx_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat: return 1;
    case at::kByte: return 2;
    case at::kChar: return 3;
    case at::kShort: return 5;
    case at::kInt: return 6;
    case at::kLong: return 7;
    case at::kBool: return 9;
    case at::kHalf: return 10;
    case at::kDouble: return 11;
    default: throw std::runtime_error(std::string("ONNX has no ") + c10::toString(dtype));
  }
}

void check_model(const std::string& model, const std::vector<std::string>& given) {
  ModelCheck(given).message(Message::kModel, model, 0, false);
}

void add_initializers(std::string& model, const std::vector<std::string>& names, const std::vector<at::Tensor>& tensors) {
  for (size_t i = 0; i < names.size(); ++i) {
    const auto dense = tensors[i].contiguous();
    std::string head;
    for (const int64_t size : dense.sizes()) put_number(kDims, static_cast<uint64_t>(size), head);
    put_number(kDataType, static_cast<uint64_t>(onnx_type(dense.scalar_type())), head);
    put_length(kName, names[i].size(), head);
    head += names[i];
    put_length(kRawData, dense.nbytes(), head);
    std::string tensor_head;
    put_length(kInitializerField, head.size() + dense.nbytes(), tensor_head);
    put_length(kGraphField, tensor_head.size() + head.size() + dense.nbytes(), model);
    model.append(tensor_head).append(head).append(static_cast<const char*>(dense.const_data_ptr()), dense.nbytes());
  }
}

}  // namespace blade
