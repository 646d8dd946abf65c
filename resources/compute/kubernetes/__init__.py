"""Jobs as gangs of pods on a Kubernetes cluster.

- `backend`: what supervisors use. It writes and reads rows of `cluster_jobs`, and reads logs from the object store.
- `controller`: the one process that calls the API server. It creates, follows and deletes the objects of all jobs
  (`submission`), from copies of what the cluster has (`watch`, `view`), while it leads (`leader`).
- Decisions are pure functions: `gang`, `pod_manifest`, `job_manifest` and `gangs` render a job's objects; `states` reads
  what the cluster says about them; `phases`, `endings` and `exits` decide how a job stands and why its attempts ended.
- `setup` is for administrators who install a cluster: `hanzo-ml cluster render` and `hanzo-ml cluster check`.

Sources: specification rows A6, G2, G4, H1-H3, H8, J3, J6, J7, X2, X3, X6, Z9, Z10 and facts/kubernetes.md.
"""
