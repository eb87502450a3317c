# SPDX-License-Identifier: Apache-2.0
# The target blade::blade: blade's runtime, its header, and libtorch.
#
#   find_package(blade REQUIRED)
#   target_link_libraries(app PRIVATE blade::blade)
#
#   cmake -S . -B build -DCMAKE_PREFIX_PATH="$(python -c 'import blade; print(blade.cmake_prefix_path)')"

get_filename_component(BLADE_INSTALL_PREFIX "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
set(BLADE_LIBRARY "${BLADE_INSTALL_PREFIX}/libblade_runtime.so")
if(NOT EXISTS "${BLADE_LIBRARY}")
  set(blade_FOUND FALSE)
  set(blade_NOT_FOUND_MESSAGE "blade's runtime is not built: there is no ${BLADE_LIBRARY}")
  return()
endif()

include(CMakeFindDependencyMacro)
find_dependency(Torch HINTS "${BLADE_INSTALL_PREFIX}/../torch")

# The runtime fits one minor version of libtorch.
file(STRINGS "${BLADE_LIBRARY}" _blade_built_with REGEX "^blade-built-with-torch=")
string(REGEX MATCH "[0-9]+\\.[0-9]+" _blade_built_with "${_blade_built_with}")
string(REGEX MATCH "^[0-9]+\\.[0-9]+" _blade_torch "${Torch_VERSION}")
if(NOT _blade_built_with STREQUAL _blade_torch)
  set(blade_FOUND FALSE)
  set(blade_NOT_FOUND_MESSAGE "blade's runtime is built for libtorch ${_blade_built_with}, and this is ${Torch_VERSION}")
  return()
endif()

if(NOT TARGET blade::blade)
  add_library(blade::blade SHARED IMPORTED)
  set_target_properties(blade::blade PROPERTIES
    IMPORTED_LOCATION "${BLADE_LIBRARY}"
    IMPORTED_SONAME "libblade_runtime.so"
    INTERFACE_INCLUDE_DIRECTORIES "${BLADE_INSTALL_PREFIX}/include"
    INTERFACE_LINK_LIBRARIES "${TORCH_LIBRARIES}"
    # A program may call torch::jit::load alone, and no function of the runtime.
    INTERFACE_LINK_OPTIONS "LINKER:--no-as-needed")
  if(_blade_torch VERSION_GREATER_EQUAL 2.12)
    set_property(TARGET blade::blade PROPERTY INTERFACE_COMPILE_FEATURES cxx_std_20)
  else()
    set_property(TARGET blade::blade PROPERTY INTERFACE_COMPILE_FEATURES cxx_std_17)
  endif()
endif()
