#!/bin/sh
# Start a Redis or Valkey server with two users, whose passwords are files in $SECRETS.
# Usage: start.sh redis-server [options].  `default` may do nothing; `kvoffload` has what an engine
# needs; `operator` may also list and remove names, for `kvoffload inspect` and `kvoffload gc`.
set -eu
umask 077
secrets=${SECRETS:-/run/secrets}

hash_of() {  # the ACL file has hashes, so a password may have any characters
    password=$(cat "$secrets/$1")
    if [ "${#password}" -lt 16 ]; then
        echo "start.sh: $secrets/$1 is shorter than 16 characters: openssl rand -hex 32 > $1" >&2
        exit 1
    fi
    printf %s "$password" | sha256sum | cut -c 1-64
}

engine=$(hash_of password)
operator=$(hash_of operator_password)
acl=$(mktemp)
cat > "$acl" <<END
user default off
user kvoffload on #$engine ~kvoffload:* +getex +psetex +exists +pexpire +unlink +ping +info
user operator on #$operator ~kvoffload:* +scan +strlen +pttl +get +getrange +unlink +ping +info
END
exec "$@" --aclfile "$acl"
