#!/bin/sh
# What `make test-cluster` needs of the system, from Debian's or Ubuntu's packages; nothing where it is there already.
# Exit code 2 and one line that says why where it cannot be had. Starts no service.
set -eu
PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"
packages="slurm-wlm slurmdbd munge mariadb-server openssh-server openssh-client rsync"

if [ "$(id -u)" != 0 ]; then
  echo "error: needs root: Slurm starts jobs for other users, and its nodes are namespaces" >&2
  echo "hint: in a container of Debian 12, say; sudo would leave root's files in .venv" >&2
  exit 2
fi
for command in slurmctld slurmd slurmdbd sbatch munged mariadbd mariadb-install-db sshd ssh rsync; do
  if ! command -v "$command" >/dev/null; then
    if ! command -v apt-get >/dev/null; then
      echo "error: $command is not installed, and there is no apt-get; wanted, by Debian's names: $packages" >&2
      exit 2
    fi
    echo "installing $packages"
    # Exit code 101 of this file is Debian's way to say: install services, do not start them.
    policy=/usr/sbin/policy-rc.d
    if [ ! -e $policy ]; then
      printf '#!/bin/sh\nexit 101\n' > $policy
      chmod +x $policy
      trap 'rm -f $policy' EXIT
    fi
    log=$(mktemp)
    if ! { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages
         } >"$log" 2>&1 </dev/null; then
      tail -n 5 "$log" >&2
      echo "error: apt-get cannot install $packages" >&2
      exit 2
    fi
    rm -f "$log"
    break
  fi
done
