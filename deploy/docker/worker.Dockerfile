# syntax=docker/dockerfile:1
# Prefill and decode workers, for CPUs and for NVIDIA GPUs. From the repository's root:
#   docker build -f deploy/docker/worker.Dockerfile --target cpu -t tandem-worker:0.1.0-cpu .
#   docker build -f deploy/docker/worker.Dockerfile --target cuda -t tandem-worker:0.1.0-cuda .
# PIP_EXTRA_INDEX_URL: for `cpu`, one with CPU builds of torch makes the image some gigabytes smaller.
# FLASH_ATTN=2: compiles flash-attn into `cuda` (an hour or more; serving works without it); 3: its version for Hopper.
ARG BASE=python:3.12-slim-bookworm
# The major version is that of torch's wheel, which brings CUDA's libraries; the driver comes from the node.
ARG CUDA_VERSION=13.0.2

FROM ${BASE} AS build-cpu
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv --without-pip /opt/tandem
WORKDIR /src
# Dependencies in a layer of their own: large, and a change of the source does not install them again.
COPY pyproject.toml constraints.txt deploy/docker/requirements.py ./
RUN python requirements.py worker > requirements.txt \
    && pip --python /opt/tandem/bin/python install --no-cache-dir -c constraints.txt -r requirements.txt
COPY . .
RUN pip --python /opt/tandem/bin/python install --no-cache-dir --no-deps -c constraints.txt ./deploy/client .
# setup.py compiles the native kernels for one processor, or goes on without them; an image has them for all.
RUN cd / && /opt/tandem/bin/python -m kernels.cpu.build --all

FROM ${BASE} AS cpu
LABEL org.opencontainers.image.title="tandem-worker" \
    org.opencontainers.image.description="Prefill and decode workers of Tandem, for CPUs." \
    org.opencontainers.image.version="0.1.0" \
    org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --uid 65532 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin tandem
COPY --from=build-cpu /opt/tandem /opt/tandem
ENV PATH=/opt/tandem/bin:${PATH} HOME=/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
WORKDIR /tmp
USER 65532:65532
EXPOSE 50061 50062 50063 9091 9092
ENTRYPOINT ["tandem"]

FROM nvidia/cuda:${CUDA_VERSION}-devel-ubuntu24.04 AS build-cuda
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG FLASH_ATTN=0
# Of flash-attn's repository, for version 3, which is no package of an index.
ARG FLASH_ATTN_COMMIT=0251105a2fb19d2957484b7f023cd8c115286ced
# Of tandem-serving, such as worker,nixl.
ARG EXTRAS=worker
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git ninja-build python3-dev python3-pip python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv --without-pip /opt/tandem
WORKDIR /src
COPY pyproject.toml constraints.txt deploy/docker/requirements.py ./
RUN python3 requirements.py "${EXTRAS}" > requirements.txt \
    && pip --python /opt/tandem/bin/python install --no-cache-dir -c constraints.txt -r requirements.txt
# Compiled against the torch that was just installed, hence without isolation.
RUN case "${FLASH_ATTN}" in \
        0) exit 0 ;; \
        2) what='flash-attn>=2.7' ;; \
        3) what="git+https://github.com/Dao-AILab/flash-attention.git@${FLASH_ATTN_COMMIT}#subdirectory=hopper" ;; \
        *) echo "FLASH_ATTN is 0, 2 or 3, not ${FLASH_ATTN}" >&2; exit 1 ;; \
    esac \
    && pip --python /opt/tandem/bin/python install --no-cache-dir -c constraints.txt packaging psutil setuptools wheel \
    && FLASH_ATTENTION_FORCE_BUILD=TRUE FLASH_ATTENTION_DISABLE_BACKWARD=TRUE \
        pip --python /opt/tandem/bin/python install --no-cache-dir -c constraints.txt --no-build-isolation "${what}"
COPY . .
RUN pip --python /opt/tandem/bin/python install --no-cache-dir --no-deps -c constraints.txt ./deploy/client .
RUN cd / && /opt/tandem/bin/python -m kernels.cpu.build --all

FROM nvidia/cuda:${CUDA_VERSION}-base-ubuntu24.04 AS cuda
LABEL org.opencontainers.image.title="tandem-worker" \
    org.opencontainers.image.description="Prefill and decode workers of Tandem, for NVIDIA GPUs." \
    org.opencontainers.image.version="0.1.0" \
    org.opencontainers.image.licenses="Apache-2.0"
# Triton compiles a small launcher in C when it first runs a kernel.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3 python3-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 65532 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin tandem
COPY --from=build-cuda /opt/tandem /opt/tandem
ENV PATH=/opt/tandem/bin:${PATH} HOME=/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=/tmp/triton
WORKDIR /tmp
USER 65532:65532
EXPOSE 50061 50062 50063 9091 9092
ENTRYPOINT ["tandem"]
