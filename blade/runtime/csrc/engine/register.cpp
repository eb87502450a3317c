// SPDX-License-Identifier: Apache-2.0
// What Python and TorchScript see of this library.
#include <torch/library.h>
#include <torch/version.h>

#include "device/accelerator.h"
#include "engine/checksum.h"
#include "device/cpu_features.h"
#include "engine/engine.h"
#include "engine/interrupt.h"
#include "engine/originals.h"
#include "engine/policy.h"
#include "execute/workers.h"
#include "model/model.h"

// For whoever reads this file without being able to load it: `python -m blade doctor`.
extern "C" __attribute__((used, visibility("default"))) const char blade_built_with[] =
    "blade-built-with-torch=" TORCH_VERSION;

// Read by Python (blade/runtime/engine.py), and by nothing that a file can say.
extern "C" __attribute__((used, visibility("default"))) int64_t blade_token() { return blade::process_token(); }

namespace blade {
namespace {

std::vector<std::string> isa_features() { return {cpu_features().begin(), cpu_features().end()}; }

}  // namespace
}  // namespace blade

TORCH_LIBRARY(blade, m) {
  using blade::Engine;
  m.class_<Engine>("Engine")
      .def(torch::init<
           std::string, std::string, std::string, at::Tensor, std::vector<at::Tensor>, const blade::Limits&>())
      .def("try_execute", &Engine::try_execute)
      .def("profile", &Engine::profile)
      .def("stats", &Engine::stats)
      .def("set_enabled", &Engine::set_enabled)
      .def("adopt", &Engine::adopt)
      .def("rearm", &Engine::rearm)
      .def("renew", &Engine::renew)
      .def("trim", &Engine::trim)
      .def("lend", &Engine::lend)
      .def("set_limit", &Engine::set_limit)
      .def("is_due", &Engine::is_due)
      .def("agrees", &Engine::agrees)
      .def("set_signature", &Engine::set_signature)
      .def("signature", [](const c10::intrusive_ptr<Engine>& self) { return self->signature(); })
      .def("last_error", &Engine::last_error)
      .def("why_unavailable", &Engine::why_unavailable)
      .def("name", [](const c10::intrusive_ptr<Engine>& self) { return self->name(); })
      .def("backend", [](const c10::intrusive_ptr<Engine>& self) { return self->backend(); })
      .def("program", [](const c10::intrusive_ptr<Engine>& self) { return self->program(); })
      .def_pickle(
          [](const c10::intrusive_ptr<Engine>& self) { return self->to_state(); },
          [](Engine::State state) { return Engine::from_state(std::move(state)); });
  using blade::Model;
  m.class_<Model>("Model")
      .def(torch::init<const at::Tensor&>())
      .def("run", &Model::run)
      .def("stats", &Model::stats)
      .def("form", [](const c10::intrusive_ptr<Model>& self, const std::string& method) { return self->form(method); })
      .def("module", [](const c10::intrusive_ptr<Model>& self) { return c10::IValue(self->module()._ivalue()); })
      .def("number", [](const c10::intrusive_ptr<Model>& self) { return self->number(); })
      // The caches of fake tensors compare arguments.
      .def("__eq__", [](const c10::intrusive_ptr<Model>& self, const c10::intrusive_ptr<Model>& other) { return self == other; })
      // torch.export then hands the model itself to the fake kernel (blade/runtime/model.py), which asks for its forms
      .def("tracing_mode", [](const c10::intrusive_ptr<Model>&) { return std::string("real"); })
      .def_pickle(
          [](const c10::intrusive_ptr<Model>& self) { return self->to_state(); },
          [](const Model::State& state) { return Model::from_state(state); });
  m.def("live_models() -> __torch__.torch.classes.blade.Model[]", &blade::live_models);
  m.def("run_model(__torch__.torch.classes.blade.Model model, str method, Tensor[] inputs) -> Tensor[]");
  m.def("cpu_quota(str root) -> int", &blade::cpu_quota);
  m.def("isa_features() -> str[]", &blade::isa_features);
  m.def("announce_runner(str backend, bool keeps_inputs) -> ()", [](const std::string& backend, bool keeps_inputs) {
    blade::announce_runner(backend, keeps_inputs);
  });
  m.def("allow_op(str name) -> ()", [](const std::string& name) { blade::allow_call(name); });
  // TorchScript has no aten::view.dtype.
  m.def("view_dtype(Tensor(a) self, ScalarType dtype) -> Tensor(a)", [](const at::Tensor& self, at::ScalarType dtype) {
    return self.view(dtype);
  });
  m.def("xxh64(Tensor bytes) -> int", [](const at::Tensor& bytes) {
    TORCH_CHECK(bytes.is_cpu() && bytes.is_contiguous(), "blade: xxh64 takes a contiguous tensor on the CPU");
    return static_cast<int64_t>(blade::xxh64(bytes.const_data_ptr(), bytes.nbytes()));
  });
  m.def("note_interrupt() -> ()", &blade::note_interrupt);
  m.def("expect_interrupts() -> ()", &blade::expect_interrupts);
  // The library of an accelerator calls this when it is loaded (accelerator.h); `pointer` is its Accelerator.
  m.def("register_accelerator(str name, int abi, int pointer) -> ()", [](std::string name, int64_t abi, int64_t pointer) {
    blade::register_accelerator(name, abi, reinterpret_cast<blade::Accelerator*>(pointer));
  });
  m.def("accelerators() -> str[]", &blade::accelerator_names);
  m.def("announce_original(int number, bool is_known) -> ()", &blade::announce_original);
  m.def("note_changed_original(int number) -> ()", &blade::note_changed_original);
  // Conservative, or it would be folded into a constant.
  m.def(
      torch::schema("has_original_changed(int number) -> bool", c10::AliasAnalysisKind::CONSERVATIVE),
      &blade::has_original_changed);
  m.def("original_calls(int number) -> int", &blade::original_calls);
  // Conservative, or dead code elimination would remove it.
  m.def(
      torch::schema("count_path(int number, int path) -> ()", c10::AliasAnalysisKind::CONSERVATIVE), &blade::count_path);
  m.def("path_calls(int number, int path) -> int", &blade::path_calls);
  m.def("reset_path_calls(int number) -> ()", &blade::reset_path_calls);
  m.def("answer_by_original(Any inputs, int number, int outputs, str text) -> Tensor[]", &blade::answer_by_original);
  // Python implements these (blade/runtime/engine.py). load_runner: "" or why it cannot.
  m.def("load_runner(str backend, str name, Tensor payload, Tensor[] constants, str program) -> str");
  m.def("run_runner(Tensor payload, Tensor[] inputs) -> Tensor[]");
  m.def("call_original(int number, int outputs, str text, Any inputs) -> Tensor[]");
  // "" if a trusted key signed the rest, else a sentence.
  m.def(
      "why_untrusted(str name, str backend, str program, str[] limit_names, int[] limits, Tensor[] tensors, str signature) -> "
      "str");
}

// Not m.def(schema, function): that would be CompositeImplicit, which torch.export takes apart.
TORCH_LIBRARY_IMPL(blade, CompositeExplicitAutograd, m) { m.impl("run_model", &blade::run_model); }
