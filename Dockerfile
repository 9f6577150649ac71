# mdata and mtrain with PyTorch, from a checkout:
#   docker build -t mdata-mtrain .
#   docker run --rm -v "$PWD:/work" mdata-mtrain mdata preprocess --help
# EXTRAS: further optional dependencies of pyproject.toml, such as "train,objects".
ARG PYTHON=3.12
FROM python:${PYTHON}-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

FROM python:${PYTHON}-slim
ARG EXTRAS=train
# torch.compile builds small operations with a compiler.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY constraints.txt /tmp/constraints.txt
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir -c /tmp/constraints.txt "$(ls /wheels/*.whl)[${EXTRAS}]" && rm -r /wheels
RUN useradd --create-home user
USER user
WORKDIR /work
CMD ["mtrain", "--help"]
