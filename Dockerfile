# The cookbook on a CPU: `docker build -t nemotron-cookbook .`, then, in a folder that keeps what runs write,
# `docker run --rm -it -v "$PWD:/work" nemotron-cookbook nano3 pipe -c tiny`.
#
# --build-arg PIP_FLAGS="--extra-index-url URL" takes another build of torch, as with make: on Linux the default one brings
# several GB for CUDA, and PyTorch's own selector has the URL of the CPU build.
FROM python:3.12-slim

ARG PIP_FLAGS=""
WORKDIR /cookbook
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir $PIP_FLAGS -c src/nemotron/constraints.txt -e ".[train]"

# Runs and artifacts go to ./output.
WORKDIR /work
ENTRYPOINT ["nemotron"]
CMD ["--help"]
