//! Files: the images, their backing files, and nothing else.
//!
//! Landlock denies everything that a rule does not allow: opening, making, removing and running files,
//! TCP, and, from Linux 6.12 on, abstract sockets of others and signals to them. Descriptors that are open stay
//! usable.

use block::report::LoggedOnce;
use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset,
    RulesetAttr, RulesetCreatedAttr, RulesetStatus, Scope,
};
use std::path::Path;

use super::{AllowedFiles, SandboxError};

/// The newest Landlock whose restrictions are asked for; an older kernel does what it can.
const NEWEST: ABI = ABI::V6;

pub(super) fn restrict(allowed: &AllowedFiles) -> Result<(), SandboxError> {
    let ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(NEWEST))
        .and_then(|ruleset| ruleset.handle_access(AccessNet::from_all(NEWEST)))
        .and_then(|ruleset| ruleset.scope(Scope::from_all(NEWEST)))
        .and_then(Ruleset::create)
        .map_err(SandboxError::Landlock)?;
    let write = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::Truncate;
    let read: BitFlags<AccessFs> = AccessFs::ReadFile.into();
    let remove: BitFlags<AccessFs> = AccessFs::RemoveFile.into();
    // A socket is made in a folder that is read to lock it.
    let open = write | remove | AccessFs::MakeSock | AccessFs::ReadDir;
    let rules = [
        (&allowed.writable, write),
        (&allowed.readable, read),
        (&allowed.readable_in, read | AccessFs::ReadDir),
        (&allowed.removable_in, remove),
        (&allowed.open, open),
    ];
    let mut ruleset = ruleset;
    for (paths, access) in rules {
        for path in paths {
            let rule = PathBeneath::new(path_of(path)?, access);
            ruleset = ruleset.add_rule(rule).map_err(SandboxError::Landlock)?;
        }
    }
    let status = ruleset.restrict_self().map_err(SandboxError::Landlock)?;
    static LOGGED: LoggedOnce = LoggedOnce::new();
    if status.ruleset == RulesetStatus::FullyEnforced || !LOGGED.admit() {
        return Ok(());
    }
    match status.ruleset {
        RulesetStatus::FullyEnforced => {}
        RulesetStatus::PartiallyEnforced => {
            tracing::info!("this kernel's Landlock is not the newest; what it has of the sandbox is on");
        }
        RulesetStatus::NotEnforced => {
            tracing::warn!(
                "this kernel has no Landlock: files are not restricted; the rest of the sandbox is on"
            );
        }
    }
    Ok(())
}

fn path_of(path: &Path) -> Result<PathFd, SandboxError> {
    PathFd::new(path).map_err(|source| SandboxError::File {
        path: path.to_owned(),
        source,
    })
}
