#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A real Slurm on this machine, without systemd and without touching /etc: munge, a controller and one node, run by the
# calling user.
#   cluster.sh start FOLDER [GPUS]     starts it in a new FOLDER; SLURM_CONF=FOLDER/slurm.conf then talks to it
#   cluster.sh stop FOLDER             ends every daemon and job it started; safe to call twice
# The node reports 8 cores and 64 GB for each of its GPUs, whatever the machine has (config_overrides), so that job
# scripts run with the requests they make on a real cluster. Its GPUs are plain files, which Slurm assigns as it assigns
# real ones (CUDA_VISIBLE_DEVICES). Status 77: this machine cannot run Slurm, and one line says why.
set -uo pipefail
PATH=$PATH:/usr/sbin:/sbin
command=${1:-} folder=${2:-} gpus=${3:-4}

usage() { echo "usage: cluster.sh start|stop FOLDER [GPUS]" >&2; exit 2; }
cannot() { echo "cluster.sh: $*" >&2; exit 77; }
pid_of() { [ -s "$folder/$1.pid" ] && cat "$folder/$1.pid"; }

failed() {  # failed DAEMON: shows why it did not start
    cat "$folder/$1.out" "$folder/$1.log" >&2
    stop
    cannot "$1 does not start"
}

stop() {
    local name pid waited
    [ -d "$folder" ] || return 0
    [ ! -s "$folder/slurm.conf" ] || [ -z "$(pid_of slurmctld)" ] ||
        SLURM_CONF=$folder/slurm.conf timeout 20 scancel --full --signal=KILL --user="$(id -un)" >/dev/null 2>&1
    for name in slurmd slurmctld munged; do
        pid=$(pid_of "$name") || continue
        kill "$pid" 2>/dev/null || continue
        for ((waited = 0; waited < 50; waited++)); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
        kill -9 "$pid" 2>/dev/null
    done
    # What serves running steps outlives slurmd on purpose; its sockets lie in our folder.
    for pid in /proc/[0-9]*; do
        case "$(readlink "$pid/exe" 2>/dev/null) $(readlink "$pid/cwd" 2>/dev/null)" in
            *" $folder/spool" | *"/slurmstepd $folder") kill -9 "${pid#/proc/}" 2>/dev/null ;;
        esac
    done
    return 0
}

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

start() {
    local tool i user host ctld_port node_port
    for tool in munged slurmctld slurmd sbatch srun scontrol squeue; do
        command -v "$tool" >/dev/null || cannot "$tool is not installed (on Debian: apt-get install slurm-wlm munge)"
    done
    user=$(id -un)
    host=$(hostname -s)
    rm -rf "$folder"
    mkdir -p "$folder"/{state,spool,munge} && chmod 755 "$folder"/{state,spool,munge} || cannot "cannot write '$folder'"
    folder=$(cd "$folder" && pwd)
    # munge wants a key that only its owner can read, and a socket folder that all users can reach.
    (umask 077 && head -c 128 /dev/urandom >"$folder/munge/key")
    munged --force --key-file="$folder/munge/key" --socket="$folder/munge/socket" --pid-file="$folder/munged.pid" \
        --log-file="$folder/munged.log" --seed-file="$folder/munge/seed" >"$folder/munged.out" 2>&1 ||
        { cat "$folder/munged.out" >&2; cannot "munged does not start"; }
    ctld_port=$(free_port)
    node_port=$(free_port)
    for ((i = 0; i < gpus; i++)); do ln -s /dev/null "$folder/gpu$i"; done
    [ "$gpus" -eq 0 ] ||
        echo "NodeName=$host Name=gpu Flags=nvidia_gpu_env File=$folder/gpu[0-$((gpus - 1))]" >"$folder/gres.conf"
    cores=$((gpus > 0 ? 8 * gpus : 8))
    memory=$((65536 * (gpus > 0 ? gpus : 1)))
    cat >"$folder/slurm.conf" <<-END
	ClusterName=esa
	SlurmctldHost=$host(127.0.0.1)
	SlurmctldPort=$ctld_port
	SlurmdPort=$node_port
	SlurmUser=$user
	SlurmdUser=$user
	AuthType=auth/munge
	AuthInfo=socket=$folder/munge/socket,cred_expire=5
	CryptoType=crypto/munge
	StateSaveLocation=$folder/state
	SlurmdSpoolDir=$folder/spool
	SlurmctldPidFile=$folder/slurmctld.pid
	SlurmdPidFile=$folder/slurmd.pid
	SlurmctldLogFile=$folder/slurmctld.log
	SlurmdLogFile=$folder/slurmd.log
	ProctrackType=proctrack/linuxproc
	TaskPlugin=task/none
	JobAcctGatherType=jobacct_gather/none
	AccountingStorageType=accounting_storage/none
	SelectType=select/cons_tres
	SelectTypeParameters=CR_CPU_Memory
	DefMemPerCPU=2048
	SchedulerParameters=sched_interval=2,sched_min_interval=100000,batch_sched_delay=0
	SlurmdParameters=config_overrides
	MpiDefault=none
	JobRequeue=1
	ReturnToService=2
	KillWait=5
	MinJobAge=3600
	SlurmctldDebug=info
	SlurmdDebug=info
	GresTypes=gpu
	NodeName=$host NodeAddr=127.0.0.1 CPUs=$cores RealMemory=$memory Gres=gpu:$gpus State=UNKNOWN
	PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
END
    export SLURM_CONF=$folder/slurm.conf
    slurmctld -c >"$folder/slurmctld.out" 2>&1 || failed slurmctld
    (cd "$folder/spool" && slurmd -c >"$folder/slurmd.out" 2>&1) || failed slurmd
    for ((i = 0; i < 300; i++)); do
        case "$(sinfo -h -o %T 2>/dev/null)" in idle*) return 0 ;; esac
        sleep 0.1
    done
    sinfo >&2
    tail -n 20 "$folder/slurmctld.log" "$folder/slurmd.log" >&2
    stop
    cannot "the node does not come up"
}

[ -n "$folder" ] || usage
case "$command" in start) start ;; stop) [ ! -d "$folder" ] || folder=$(cd "$folder" && pwd); stop ;; *) usage ;; esac
