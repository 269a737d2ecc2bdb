# docker buildx bake -f images/bake.hcl: both images, for registries and caches. `make images` builds the same with buildah.
variable "REGISTRY" { default = "localhost" }
variable "VERSION" { default = "0.1.0" }
variable "REVISION" { default = "unknown" }
variable "SOURCE_DATE_EPOCH" { default = "315532800" }

group "default" { targets = ["operator", "runtime"] }

target "common" {
  context    = "."
  dockerfile = "Dockerfile"
  platforms  = ["linux/amd64"]
  args = {
    VERSION           = VERSION
    REVISION          = REVISION
    SOURCE_DATE_EPOCH = SOURCE_DATE_EPOCH
  }
  attest = ["type=sbom", "type=provenance,mode=max"]
}

target "operator" {
  inherits = ["common"]
  target   = "operator"
  tags     = ["${REGISTRY}/orbit-operator:${VERSION}"]
}

target "runtime" {
  inherits = ["common"]
  target   = "runtime"
  tags     = ["${REGISTRY}/orbit-runtime:${VERSION}"]
}
