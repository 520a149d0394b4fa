//! As much of the shell's language as the documents use: words, quotes, comments, operators.

/// Splits a script into commands, each into its words. Redirections are left out.
pub(crate) fn commands(script: &str) -> Result<Vec<Vec<String>>, String> {
    let mut commands = vec![Vec::new()];
    let mut word: Option<String> = None;
    let mut is_target = false;
    let mut letters = script.chars().peekable();
    loop {
        let letter = letters.next();
        let ends_word = matches!(
            letter,
            None | Some(' ' | '\t' | '\n' | ';' | '|' | '&' | '(' | ')' | '<' | '>')
        );
        if ends_word
            && let Some(word) = word.take()
            && !std::mem::take(&mut is_target)
            && let Some(command) = commands.last_mut()
        {
            command.push(word);
        }
        match letter {
            None => break,
            Some(' ' | '\t') => {}
            Some('<' | '>') => is_target = true,
            Some('\n' | ';' | '|' | '&' | '(' | ')') => commands.push(Vec::new()),
            Some('#') if word.is_none() => while letters.next_if(|&letter| letter != '\n').is_some() {},
            Some(quote @ ('\'' | '"')) => {
                let word = word.get_or_insert_default();
                loop {
                    match letters.next() {
                        None => return Err(format!("a {quote} is not closed")),
                        Some(letter) if letter == quote => break,
                        Some('\\') if quote == '"' => word.extend(letters.next()),
                        Some(letter) => word.push(letter),
                    }
                }
            }
            Some('\\') => match letters.next() {
                Some('\n') | None => {}
                Some(letter) => word.get_or_insert_default().push(letter),
            },
            Some(letter) => word.get_or_insert_default().push(letter),
        }
    }
    commands.retain(|words| !words.is_empty());
    Ok(commands)
}

#[test]
fn commands_splits_words_like_the_shell() {
    let script = "a 'b c'\"d\\\"e\" \\\n  f#g # h 'i\nj | k>l && m # n\no \"\"\\ p; q";
    let expected = [
        &["a", "b cd\"e", "f#g"][..],
        &["j"],
        &["k"],
        &["m"],
        &["o", " p"],
        &["q"],
    ];
    assert_eq!(commands(script).expect("a script"), expected);
    assert!(commands("a 'b").is_err());
}
