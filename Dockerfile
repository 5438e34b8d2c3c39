# syntax=docker/dockerfile:1
#
#     docker build --tag optexport .
#     docker run --rm --user "$(id -u):$(id -g)" --volume "$PWD:/work" optexport run config.toml

# The Python that constraints.txt was made with.
ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS build
# The default build of torch on Linux brings CUDA packages of several gigabytes. An empty value takes that build.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
RUN python -m venv /opt/optexport
# torch goes first and alone, so that no other requirement chooses its build, and so that its layer stays as it is
# when the sources change.
COPY constraints.txt ./
RUN /opt/optexport/bin/pip install --no-deps ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' constraints.txt)"
COPY pyproject.toml README.md LICENSE ./
# With "images,ray,trust" the image is also one for a Ray cluster.
ARG EXTRAS=images,trust
# An empty package brings the dependencies, so that a change of the sources does not install them again.
RUN mkdir optexport && echo "__version__ = \"0\"" > optexport/_version.py \
    && /opt/optexport/bin/pip install --constraint constraints.txt ".[${EXTRAS}]"
COPY optexport optexport
RUN /opt/optexport/bin/pip install --no-deps .

FROM ${PYTHON_IMAGE}
# MLflow's runs bear the commit that they were made from.
RUN apt-get update && apt-get install --yes --no-install-recommends git && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/optexport /opt/optexport
# The container may run under a user id that has no passwd entry, hence no name and no home: torch, MLflow and
# matplotlib look for both. Caches lie in /work too, the one folder that has to be writable.
ENV PATH=/opt/optexport/bin:$PATH \
    HOME=/work \
    USER=optexport \
    XDG_CACHE_HOME=/work/.cache \
    TORCHINDUCTOR_CACHE_DIR=/work/.cache/torchinductor \
    MPLCONFIGDIR=/work/.cache/matplotlib \
    # Each of the three sends usage data by default.
    HF_HUB_DISABLE_TELEMETRY=1 \
    MLFLOW_DISABLE_TELEMETRY=true \
    ORT_DISABLE_TELEMETRY=1 \
    PYTHONUNBUFFERED=1
# Writable for every user id, as /tmp is.
RUN mkdir -m 1777 /work
WORKDIR /work
USER 10001:0
ENTRYPOINT ["optexport"]
CMD ["--help"]
