# kvferry for workers on NVIDIA GPUs, with RDMA. CUDA comes with torch's wheels; the driver is the node's, passed in by the
# NVIDIA container toolkit. From the root of the repository:
#   docker build --file deploy/docker/cuda.Dockerfile --tag kvferry-cuda:0.1.0 .
ARG PYTHON_IMAGE=python:3.11.13-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/kvferry
ENV PATH=/opt/kvferry/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY constraints.txt .
# Alone and first: gigabytes that change seldom stay in a layer of their own. Its triton is the one that it was built with.
RUN grep -v '^triton==' constraints.txt > constraints-cuda.txt \
    && pip install --constraint constraints-cuda.txt torch
COPY . .
ARG EXTRAS=gguf,gpu,nixl,structured,otel
RUN pip install --constraint constraints-cuda.txt ".[${EXTRAS}]"

FROM ${PYTHON_IMAGE}
# Triton compiles what launches a kernel when it is first used; the libraries drive RDMA devices.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev ibverbs-providers libibverbs1 librdmacm1 \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 kvferry \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin kvferry \
    && echo 'export PATH=/opt/kvferry/bin:$PATH' > /etc/profile.d/kvferry.sh
COPY --from=build /opt/kvferry /opt/kvferry
ENV HOME=/tmp PATH=/opt/kvferry/bin:$PATH PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /tmp
CMD ["kvferry", "--help"]
