// SPDX-License-Identifier: Apache-2.0
// The part of JSON that Python's json.dumps makes of texts, integers, lists, dicts and None.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace blade {

struct Json {
  enum Kind : uint8_t { kNull, kInteger, kText, kList, kObject };
  Kind kind = kNull;
  int64_t integer = 0;
  std::string text;
  std::vector<Json> items;                             // of a list
  std::vector<std::pair<std::string, Json>> members;  // of an object

  // The member called `name`, which throws std::runtime_error if there is none.
  const Json& at(std::string_view name) const;
  // Throw std::runtime_error for another kind.
  const std::string& as_text() const;
  std::vector<std::string> as_texts() const;
};

// Throws std::runtime_error.
Json parse_json(std::string_view text);

}  // namespace blade
