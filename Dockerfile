# Two images: `operator` (no torch) and `runtime` (trains). `make images` builds both; images/README.md says what stands where.
#
# The default bases are public; with BASE_IMAGE and OPERATOR_BASE_IMAGE any other that has, or can install, Python 3.12 or
# newer will do. HEAVY=mounted builds a runtime whose heavy packages come from a folder mounted at /opt/heavy: the same
# image, entry point and user, for tests and for clusters that share one environment between many images.
# CUBINS=downloaded adds FlashInfer's kernels for Blackwell, which its servers otherwise download when they start.
#
# Kernels are compiled when they first run: Triton needs a C compiler and Python's headers; SGLang and FlashInfer need
# nvcc, CUDA's headers and libraries, and a C++ compiler. Hence CUDA's base for development.
ARG BASE_IMAGE=docker.io/nvidia/cuda:13.0.2-devel-ubuntu24.04
ARG OPERATOR_BASE_IMAGE=docker.io/library/python:3.12.12-slim-trixie
ARG HEAVY=built
ARG CUBINS=


# What builds: an interpreter with pip, the wheel of this checkout.
FROM ${OPERATOR_BASE_IMAGE} AS operator-base
RUN command -v python3 && python3 -m ensurepip --version >/dev/null \
    || { apt-get update && apt-get install -y --no-install-recommends python3 python3-venv ca-certificates \
         && rm -rf /var/lib/apt/lists/*; }
RUN groupadd --gid 65532 orbit && useradd --uid 65532 --gid 65532 --home-dir /tmp --no-create-home --shell /usr/sbin/nologin orbit

FROM ${BASE_IMAGE} AS runtime-base
RUN command -v python3 && python3 -m ensurepip --version >/dev/null \
    || { apt-get update && apt-get install -y --no-install-recommends python3 python3-venv python3-dev gcc g++ ca-certificates \
         && rm -rf /var/lib/apt/lists/*; }
RUN groupadd --gid 65532 orbit && useradd --uid 65532 --gid 65532 --home-dir /tmp --no-create-home --shell /usr/sbin/nologin orbit

FROM operator-base AS wheel
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/build
COPY pyproject.toml README.md LICENSE /source/
COPY orbit_runtime /source/orbit_runtime
COPY operator /source/operator
ARG SOURCE_DATE_EPOCH=315532800
RUN /opt/build/bin/pip wheel --no-deps --wheel-dir /wheels /source


# The operator: what it imports and no more, which images/operator.in lists.
FROM operator-base AS operator-environment
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/build && python3 -m venv --without-pip /opt/orbit
COPY images/operator.in images/constraints/laptop.txt images/finish.sh /images/
RUN /opt/build/bin/pip --python /opt/orbit/bin/python install --no-compile -c /images/laptop.txt -r /images/operator.in \
    && sh /images/finish.sh
COPY --from=wheel /wheels /wheels
RUN /opt/build/bin/pip --python /opt/orbit/bin/python install --no-compile --no-deps /wheels/*.whl \
    && sh /images/finish.sh orbit_operator orbit_runtime

FROM operator-base AS operator
COPY --from=operator-environment /opt/orbit /opt/orbit
COPY images/smoke.sh /opt/orbit/smoke.sh
ENV PATH=/opt/orbit/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HOME=/tmp LOGNAME=orbit
USER 65532:65532
WORKDIR /
ARG VERSION=0.0.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="orbit-operator" \
      org.opencontainers.image.description="Kubernetes operator of OrbitRun" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
CMD ["python", "-m", "orbit_operator"]


# Gigabytes of torch, CUDA libraries, SGLang and Megatron, in a layer that changes only with its constraints.
FROM runtime-base AS heavy-built
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/build && python3 -m venv --without-pip /opt/orbit
COPY images/constraints/node.txt /images/constraints.txt
# Transformer Engine is pinned, but nothing uses it, and it has no wheel (docs/decisions/0007-kernels.md).
RUN grep -v '^transformer-engine' /images/constraints.txt > /images/heavy.txt \
    && /opt/build/bin/pip --python /opt/orbit/bin/python install --no-compile --no-deps -r /images/heavy.txt
ARG CUBINS
# The command ends with 0 even if it could not download.
RUN [ -z "$CUBINS" ] || { FLASHINFER_CUBIN_DIR=/opt/orbit/share/cubins /opt/orbit/bin/python -m flashinfer download-cubin \
    && find /opt/orbit/share/cubins -name '*.cubin' | grep -q .; }

FROM runtime-base AS heavy-mounted
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/build && python3 -m venv --without-pip /opt/orbit
COPY images/constraints/laptop.txt /images/constraints.txt
RUN mkdir /opt/heavy && echo /opt/heavy > "$(/opt/orbit/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/heavy.pth"

# What Orbit itself asks for, where the heavy layer has it not: before its code, which changes more often.
FROM heavy-${HEAVY} AS runtime-environment
COPY images/finish.sh /images/
COPY pyproject.toml /source/
RUN python3 -c 'import tomllib; print(*tomllib.load(open("/source/pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' > /images/needs.txt \
    && /opt/build/bin/pip --python /opt/orbit/bin/python install --no-compile -c /images/constraints.txt -r /images/needs.txt \
    && sh /images/finish.sh
COPY --from=wheel /wheels /wheels
RUN /opt/build/bin/pip --python /opt/orbit/bin/python install --no-compile -c /images/constraints.txt /wheels/*.whl \
    && sh /images/finish.sh orbit_operator orbit_runtime

FROM runtime-base AS runtime
COPY --from=runtime-environment /opt/orbit /opt/orbit
# Where the heavy packages are mounted, if they are.
RUN mkdir -p /opt/heavy
COPY images/smoke.sh images/smoke_kernels.py /opt/orbit/
COPY examples /opt/orbit/examples
ARG CUBINS
ENV PATH=/opt/orbit/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HOME=/tmp LOGNAME=orbit \
    FLASHINFER_CUBIN_DIR=${CUBINS:+/opt/orbit/share/cubins}
USER 65532:65532
WORKDIR /
ARG VERSION=0.0.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="orbit-runtime" \
      org.opencontainers.image.description="Trains LoRA and OFT adapters on a frozen, quantised base" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
ENTRYPOINT ["orbit"]
