// SPDX-License-Identifier: Apache-2.0
// Whether a model is as it was: versions and addresses of its weights, and items of the dicts of its objects
// (blade/dropin/unchanged.py, which has the same in Python). All that is compared is held by the caller's tuples,
// so that the garbage collector sees it.
#include <torch/csrc/autograd/python_variable.h>

#include <cstring>

#include "unchanged.h"

namespace blade {
namespace {

struct Weight {
  uint64_t version;
  const void* address;
};

Weight weight_of(PyObject* object) {
  if (!THPVariable_Check(object)) throw pybind11::type_error("blade: weights are tensors");
  const at::TensorImpl* impl = THPVariable_Unpack(object).unsafeGetTensorImpl();
  Weight found{0, nullptr};  // tensors of inference mode have no version
  if (impl->version_counter().enabled()) found.version = impl->version_counter().current_version();
  if (impl->has_storage()) {
    const auto* begin = static_cast<const char*>(impl->unsafe_storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get());
    found.address = begin + impl->storage_offset() * static_cast<int64_t>(impl->itemsize());
  }
  return found;
}

// Whether dict[key] equals `value`, a constant or a copy of a container of constants.
bool has_item(PyObject* dict, PyObject* key, PyObject* value) {
  PyObject* now = PyDict_GetItemWithError(dict, key);
  if (now == value) return true;
  if (now == nullptr || Py_TYPE(now) != Py_TYPE(value)) {
    PyErr_Clear();
    return false;
  }
  Py_INCREF(now);  // what compares may drop it
  const int same = PyObject_RichCompareBool(now, value, Py_EQ);
  Py_DECREF(now);
  if (same < 0) PyErr_Clear();
  return same == 1;
}

pybind11::bytes weight_facts(const pybind11::tuple& weights) {
  std::string facts(weights.size() * sizeof(Weight), '\0');
  for (size_t i = 0; i < weights.size(); ++i) {
    const Weight one = weight_of(PyTuple_GET_ITEM(weights.ptr(), i));
    std::memcpy(facts.data() + i * sizeof(Weight), &one, sizeof(Weight));
  }
  return facts;
}

bool unchanged(
    const pybind11::tuple& weights, const pybind11::bytes& facts, const pybind11::tuple& items,
    const pybind11::tuple& sizes) {
  const auto known = static_cast<std::string_view>(facts);
  if (known.size() != weights.size() * sizeof(Weight)) throw pybind11::value_error("blade: facts of other weights");
  for (size_t i = 0; i < weights.size(); ++i) {
    const Weight now = weight_of(PyTuple_GET_ITEM(weights.ptr(), i));
    Weight before;
    std::memcpy(&before, known.data() + i * sizeof(Weight), sizeof(Weight));
    if (now.version != before.version || now.address != before.address) return false;
  }
  for (size_t i = 0; i + 1 < sizes.size(); i += 2) {
    PyObject* dict = PyTuple_GET_ITEM(sizes.ptr(), i);
    if (PyDict_Size(dict) != PyLong_AsSsize_t(PyTuple_GET_ITEM(sizes.ptr(), i + 1))) {
      if (PyErr_Occurred()) throw pybind11::error_already_set();
      return false;
    }
  }
  for (size_t i = 0; i + 2 < items.size(); i += 3) {
    PyObject* dict = PyTuple_GET_ITEM(items.ptr(), i);
    if (!PyDict_Check(dict)) throw pybind11::type_error("blade: items are of dicts");
    if (!has_item(dict, PyTuple_GET_ITEM(items.ptr(), i + 1), PyTuple_GET_ITEM(items.ptr(), i + 2))) return false;
  }
  return true;
}

}  // namespace

void define_unchanged(pybind11::module_& module) {
  module.def("weight_facts", &weight_facts, "Versions and addresses of a tuple of tensors.");
  module.def(
      "unchanged", &unchanged,
      "Whether weights have these facts, dicts (dict, key, value, ...) these items, and (dict, n, ...) n items.");
}

}  // namespace blade
