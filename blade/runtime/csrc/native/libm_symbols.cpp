// SPDX-License-Identifier: Apache-2.0
// The few functions generated code may call outside itself.
#include <cmath>
#include <cstring>
#include <unordered_map>

#include "native/elf_loader.h"

namespace blade {
namespace {

using Table = std::unordered_map<std::string, void*>;

template <typename R, typename... A>
void* address(R (*function)(A...)) {
  return reinterpret_cast<void*>(function);
}

#define BLADE_MATH1(name)                                           \
  {#name, address<double, double>(&::name)}, {                      \
    #name "f", address<float, float>(&::name##f)                    \
  }
#define BLADE_MATH2(name)                                           \
  {#name, address<double, double, double>(&::name)}, {              \
    #name "f", address<float, float, float>(&::name##f)             \
  }

// LLVM asks for these by x ** n with an integer n.
float powisf2(float x, int n) { return static_cast<float>(std::pow(static_cast<double>(x), n)); }
double powidf2(double x, int n) { return std::pow(x, n); }

const Table& table() {
  static const Table functions = {
      {"memcpy", address<void*, void*, const void*, size_t>(&::memcpy)},
      {"memmove", address<void*, void*, const void*, size_t>(&::memmove)},
      {"memset", address<void*, void*, int, size_t>(&::memset)},
      {"memcmp", address<int, const void*, const void*, size_t>(&::memcmp)},
      BLADE_MATH1(exp), BLADE_MATH1(exp2), BLADE_MATH1(expm1), BLADE_MATH1(log), BLADE_MATH1(log2),
      BLADE_MATH1(log10), BLADE_MATH1(log1p), BLADE_MATH1(sqrt), BLADE_MATH1(cbrt), BLADE_MATH1(sin),
      BLADE_MATH1(cos), BLADE_MATH1(tan), BLADE_MATH1(asin), BLADE_MATH1(acos), BLADE_MATH1(atan),
      BLADE_MATH1(sinh), BLADE_MATH1(cosh), BLADE_MATH1(tanh), BLADE_MATH1(asinh), BLADE_MATH1(acosh),
      BLADE_MATH1(atanh), BLADE_MATH1(erf), BLADE_MATH1(erfc), BLADE_MATH1(tgamma), BLADE_MATH1(lgamma),
      BLADE_MATH1(floor), BLADE_MATH1(ceil), BLADE_MATH1(trunc), BLADE_MATH1(round), BLADE_MATH1(rint),
      BLADE_MATH1(nearbyint), BLADE_MATH1(fabs), BLADE_MATH2(pow), BLADE_MATH2(fmod),
      BLADE_MATH2(remainder), BLADE_MATH2(atan2), BLADE_MATH2(hypot), BLADE_MATH2(fmin), BLADE_MATH2(fmax),
      BLADE_MATH2(copysign), BLADE_MATH2(nextafter),
      {"fma", address<double, double, double, double>(&::fma)},
      {"fmaf", address<float, float, float, float>(&::fmaf)},
      {"ldexp", address<double, double, int>(&::ldexp)},
      {"ldexpf", address<float, float, int>(&::ldexpf)},
      {"frexp", address<double, double, int*>(&::frexp)},
      {"frexpf", address<float, float, int*>(&::frexpf)},
      {"modf", address<double, double, double*>(&::modf)},
      {"modff", address<float, float, float*>(&::modff)},
#if defined(__GLIBC__)
      BLADE_MATH1(roundeven), BLADE_MATH1(exp10),
      {"sincos", address<void, double, double*, double*>(&::sincos)},
      {"sincosf", address<void, float, float*, float*>(&::sincosf)},
#endif
      {"__powisf2", address(&powisf2)},
      {"__powidf2", address(&powidf2)},
  };
  return functions;
}

}  // namespace

void* find_external(const std::string& name) {
  const auto found = table().find(name);
  return found == table().end() ? nullptr : found->second;
}

}  // namespace blade
