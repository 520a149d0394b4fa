//! The memory of block devices: the saved state of each, and the images that devices without a server claim.
//!
//! The servers of devices (`ublk`) write it; whoever opens an image for writing asks it first.

pub mod claim;
pub(crate) mod claimed_file;
pub(crate) mod process;
pub(crate) mod state;
