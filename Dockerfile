# Caddy with the plugin from this checkout: docker build -t caddy-kv-cache .
#
# The builder runs on the machine's own platform and compiles for the image's.
FROM --platform=$BUILDPLATFORM caddy:2.11-builder AS builder
ARG TARGETOS TARGETARCH

WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
RUN CGO_ENABLED=0 GOOS=$TARGETOS GOARCH=$TARGETARCH xcaddy build --output /usr/bin/caddy \
    --with github.com/seed-2fa47a1e/caddy-kv-cache@v0.0.0=/src

FROM caddy:2.11
COPY --from=builder /usr/bin/caddy /usr/bin/caddy
