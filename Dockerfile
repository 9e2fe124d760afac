# Caddy with the plugin from this checkout: docker build -t caddy-kv-cache .
FROM caddy:2.11-builder AS builder

WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
RUN CGO_ENABLED=0 xcaddy build --output /usr/bin/caddy \
    --with github.com/seed-2fa47a1e/caddy-kv-cache=/src

FROM caddy:2.11
COPY --from=builder /usr/bin/caddy /usr/bin/caddy
