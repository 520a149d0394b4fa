//! The disks that a command line names.

use crate::disk_config::{DiskConfig, RateLimitGroups};
use crate::error::CommandFailure;
use crate::once;

/// Parses the disks of a command line and assigns each to its rate limit group.
///
/// # Errors
///
/// [`CommandFailure::Usage`], naming the disk and what is wrong.
pub(crate) fn parse(disks: &[String], groups: &RateLimitGroups) -> Result<Vec<DiskConfig>, CommandFailure> {
    let mut configs = Vec::new();
    for text in disks {
        let mut config = DiskConfig::parse(text)?;
        groups.join(&mut config)?;
        configs.push(config);
    }
    once::check_images(&configs)?;
    Ok(configs)
}

/// As [`parse`], of a server's; refuses disks that another program serves.
///
/// # Errors
///
/// As [`parse`].
pub(crate) fn parse_own(
    disks: &[String],
    groups: &RateLimitGroups,
) -> Result<Vec<DiskConfig>, CommandFailure> {
    let disks = parse(disks, groups)?;
    for disk in &disks {
        disk.is_own()?;
    }
    Ok(disks)
}
