#!/bin/sh
# Says which hosts an elastic job may use now: a line HOST:SLOTS each. hvdtrain asks it once a second:
#   hvdtrain launch -np 8 --elastic 4:16 --discover launchers/elastic-discovery.sh -- --config run.yaml
# Here a file has these lines. A host whose line is gone is left at the next step boundary; a new one is joined.
# Write the file by a rename (mv new hosts), so that it is never seen half written.
# In an allocation of Slurm:     scontrol show hostnames "$SLURM_JOB_NODELIST" | sed 's/$/:8/'
# Of pods of Kubernetes:         /etc/mpi/discover_hosts.sh | sed 's/$/:8/'   (or --slots 8)
exec cat -- "${HVDTRAIN_HOSTS:-hosts}"
