# SPDX-License-Identifier: Apache-2.0
# blade on NVIDIA GPUs: `docker build -f docker/cuda.Dockerfile -t blade:cuda .`, and `docker run --gpus all blade:cuda`
# torch's wheels hold the CUDA libraries; building takes the headers alone, which PyPI's packages beside torch have.
ARG PYTHON=3.11
FROM python:${PYTHON}-slim-bookworm AS build
ARG TORCH=2.13.0
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/blade
ENV PATH=/opt/blade/bin:$PATH
RUN pip install --no-cache-dir "torch==${TORCH}" numpy ninja wheel "setuptools>=77"
COPY . /src
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels /src \
 && python -c "import glob, zipfile; names = zipfile.ZipFile(*glob.glob('/wheels/*.whl')).namelist(); assert 'blade/libblade_cuda.so' in names, names" \
 && pip install --no-cache-dir "blade[gpu,onnxruntime,sign] @ file://$(echo /wheels/blade-*.whl)" \
 && pip uninstall --yes ninja wheel

# Triton compiles a launcher with the C compiler of the machine where models are optimized.
FROM python:${PYTHON}-slim-bookworm
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/blade /opt/blade
ENV PATH=/opt/blade/bin:$PATH \
    BLADE_CACHE_DIR=/var/cache/blade \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN useradd --create-home blade && install --directory --owner=blade /var/cache/blade
USER blade
WORKDIR /home/blade
CMD ["blade", "doctor"]
