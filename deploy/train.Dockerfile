# The training image: what the CPU image holds, and what trains and exports. One round of `python -m export follow`.
#   docker build -f deploy/train.Dockerfile -t recommender-train:cpu .      # after recommender:cpu (cpu.Dockerfile)
# It runs as user 10001 on a read-only root, like the CPU image; /srv/models is writable too.
ARG CPU=recommender:cpu

FROM ${CPU} AS packages
USER 0
# g++: NVTabular has no wheel
RUN apt-get update && apt-get install -y --no-install-recommends g++
COPY requirements/export.txt requirements/hashes.txt /tmp/requirements/
# torch's own index, for its CPU build: the wheel of PyPI brings CUDA. It is the one package without a hash, so it is installed apart
RUN export VIRTUAL_ENV=/opt/recommender/.venv && cd /tmp/requirements \
 && grep -v '^torch==' export.txt > hashed.txt && grep '^torch==' export.txt > torch.txt \
 && $VIRTUAL_ENV/bin/uv pip install --no-cache --no-deps --require-hashes -r hashed.txt -c hashes.txt \
 && $VIRTUAL_ENV/bin/uv pip install --no-cache --no-deps --torch-backend=cpu -r torch.txt

FROM ${CPU}
COPY --from=packages /opt/recommender/.venv /opt/recommender/.venv
COPY hps_config /opt/recommender/hps_config
COPY training /opt/recommender/training
COPY export /opt/recommender/export
COPY deploy/follow.sh /opt/recommender/deploy/follow.sh
ENTRYPOINT ["/opt/recommender/deploy/follow.sh"]
CMD ["--data", "/srv/data", "--repo", "/srv/models"]
