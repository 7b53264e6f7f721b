# syntax=docker/dockerfile:1
# The router: no torch and no compiler. From the repository's root:
#   docker build -f deploy/docker/router.Dockerfile -t tandem-router:0.1.0 .
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS build
# Where pip looks, if not in its usual place.
ARG PIP_INDEX_URL
WORKDIR /src
# Without pip inside: nothing is to be installed into the image later.
RUN python -m venv --without-pip /opt/tandem
# Dependencies in a layer of their own: a change of the source does not install them again.
COPY pyproject.toml constraints.txt deploy/docker/requirements.py ./
RUN python requirements.py > requirements.txt \
    && pip --python /opt/tandem/bin/python install --no-cache-dir -c constraints.txt -r requirements.txt
COPY . .
# Without a compiler here, setup.py leaves the workers' kernels out.
RUN pip --python /opt/tandem/bin/python install --no-cache-dir --no-deps -c constraints.txt ./deploy/client .

FROM ${BASE} AS router
LABEL org.opencontainers.image.title="tandem-router" \
    org.opencontainers.image.description="Router of Tandem: takes requests and places them on workers." \
    org.opencontainers.image.version="0.1.0" \
    org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --uid 65532 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin tandem
COPY --from=build /opt/tandem /opt/tandem
# Nothing is written but to /tmp: modules were compiled when they were installed.
ENV PATH=/opt/tandem/bin:${PATH} HOME=/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
WORKDIR /tmp
USER 65532:65532
EXPOSE 8080 50051 9090
ENTRYPOINT ["tandem"]
CMD ["router"]
