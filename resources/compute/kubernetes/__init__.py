"""From a job to the Kubernetes objects that run it, as pure functions: the same job and settings give the same objects.

`gang` says what a job is on a cluster, `torchrun` how its processes start, `pod` what each of its pods is; `jobset` (behind
Kueue) and `indexed_job` (a cluster without either) are the two ways to run it; `token_secret` is what it signs in with;
`render` picks one and writes YAML. Sources: specification rows A6, G2, G4, H1-H3, H8, J3, J6, J7, X2, X3, X6, Z9, Z10 and
facts/kubernetes.md.

Only `token_keeper` calls a cluster. KubernetesCompute, which will submit these objects, with their token through it, and
follow them, comes beside this package as another `Compute`. Until it is there, jobs run as `LocalCompute` runs them.
"""
