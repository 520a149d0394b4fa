//! Malformed images in the hands of `ringdisk`: each class the generator knows, and pairs of them, described, checked,
//! read and written under 256 MiB of address space and little time; and checked beside QEMU.

mod faced;
mod verdict;
mod world;
