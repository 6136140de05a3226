#!/bin/sh
# Lists the hosts that an elastic job may use now: a line HOST:SLOTS each. hvdtrain runs it once a second:
#   hvdtrain launch -np 8 --elastic 4:16 --discover launchers/elastic-discovery.sh -- --config run.yaml
# Here a file has these lines. The job leaves a removed host at the next step boundary, and uses a new one.
# Write the file by a rename (mv new hosts), so that no reader sees half of it.
# In an allocation of Slurm:     scontrol show hostnames "$SLURM_JOB_NODELIST" | sed 's/$/:8/'
# Of pods of Kubernetes:         /etc/mpi/discover_hosts.sh | sed 's/$/:8/'   (or --slots 8)
exec cat -- "${HVDTRAIN_HOSTS:-hosts}"
