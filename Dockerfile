# docker build -t eyas . && docker run --gpus all --shm-size 16g -v $PWD:/work eyas run -c run.yaml
# For another CUDA or no GPU: --build-arg BASE=python:3.12-slim
ARG BASE=vllm/vllm-openai:v0.32.0
FROM ${BASE}
# The history that the version comes from stays outside; say the version, or take the fallback.
ARG VERSION=0.1.0
ENV SETUPTOOLS_SCM_PRETEND_VERSION=${VERSION}
COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
RUN python3 -m pip install --no-cache-dir "/src[hub,trackers]" && rm -rf /src
WORKDIR /work
ENTRYPOINT ["eyas"]
CMD ["--help"]
