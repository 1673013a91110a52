# The CPU image: tritonserver from its Python package, the gateway, and nothing that trains.
#   docker build -f deploy/cpu.Dockerfile -t recommender:cpu .
# One image, two commands (deploy/serve.sh): `server`, the default, and `gateway`. It runs as user 10001 on a read-only root;
# writable are /run/recommender and /tmp (memory), /var/cache/recommender (compiled loops) and /srv (live events).
# BASE: pin it by digest where you build for production (--build-arg BASE=python:3.12-slim-bookworm@sha256:…).
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS packages
COPY requirements/serve.txt requirements/hashes.txt requirements/uv.txt /tmp/requirements/
# --compile-bytecode: no process can write it on a read-only root, so each would compile its libraries at every start
RUN python -m venv /opt/recommender/.venv \
 && /opt/recommender/.venv/bin/pip install --no-cache-dir --no-deps --require-hashes -r /tmp/requirements/uv.txt \
 && VIRTUAL_ENV=/opt/recommender/.venv /opt/recommender/.venv/bin/uv pip install --no-cache --no-deps --compile-bytecode \
      --require-hashes -r /tmp/requirements/serve.txt -c /tmp/requirements/hashes.txt

FROM ${BASE}
# libgomp1: numeric wheels built with OpenMP
RUN apt-get update \
 && apt-get install -y --no-install-recommends libgomp1 \
 && rm -rf /var/lib/apt/lists/*
COPY --from=packages /opt/recommender/.venv /opt/recommender/.venv
COPY serving /opt/recommender/serving
COPY repository /opt/recommender/repository
COPY server /opt/recommender/server
COPY gateway /opt/recommender/gateway
COPY live /opt/recommender/live
COPY trials /opt/recommender/trials
COPY clients /opt/recommender/clients
COPY deploy/serve.sh deploy/alive.py /opt/recommender/deploy/
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin recommender \
 && install -d -o recommender -m 0700 /run/recommender /var/cache/recommender /srv/models.live \
 && ln -s /run/recommender /opt/recommender/.run
ENV NUMBA_CACHE_DIR=/var/cache/recommender PYTHONDONTWRITEBYTECODE=1
WORKDIR /opt/recommender
USER 10001
EXPOSE 8001 8002 8080
ENTRYPOINT ["/opt/recommender/deploy/serve.sh"]
CMD ["server"]
