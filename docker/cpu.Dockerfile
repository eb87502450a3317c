# SPDX-License-Identifier: Apache-2.0
# blade on the CPU: `docker build -f docker/cpu.Dockerfile -t blade:cpu .`
# The stage "runtime" has what saved models need; the last one also has the libraries that compete for them.
ARG PYTHON=3.11
FROM python:${PYTHON}-slim-bookworm AS build
ARG TORCH=2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/blade
ENV PATH=/opt/blade/bin:$PATH
RUN pip install --no-cache-dir "torch==${TORCH}" --index-url "${TORCH_INDEX}" \
 && pip install --no-cache-dir numpy ninja wheel "setuptools>=77"
COPY . /src
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels /src \
 && pip install --no-cache-dir /wheels/*.whl \
 && pip uninstall --yes ninja wheel

FROM python:${PYTHON}-slim-bookworm AS runtime
COPY --from=build /opt/blade /opt/blade
ENV PATH=/opt/blade/bin:$PATH \
    BLADE_CACHE_DIR=/var/cache/blade
RUN useradd --create-home blade && install --directory --owner=blade /var/cache/blade
USER blade
WORKDIR /home/blade
CMD ["blade", "doctor"]

# AOTInductor, TVM and programs in C++ need the compiler, also where models are optimized.
FROM runtime AS optimize
COPY --from=build /wheels /wheels
USER root
RUN apt-get update \
 && apt-get install --yes --no-install-recommends cmake g++ make \
 && rm -rf /var/lib/apt/lists/* \
 && pip install --no-cache-dir "blade[onnxruntime,openvino,tvm,sign] @ file://$(echo /wheels/blade-*.whl)"
USER blade
